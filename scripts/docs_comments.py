"""For the reference: uses the comment after a field as the field's description, where our arrays have their shapes."""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension

COMMENT = re.compile(r".*?  # (.+)")


class FieldComments(Extension):
    """Describes a class attribute without a docstring by the comment on its first line."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Makes the comment the attribute's docstring."""
        is_field = attr.docstring is None and attr.parent is not None and attr.parent.is_class
        if is_field and (found := COMMENT.fullmatch(attr.source.partition("\n")[0])):
            attr.docstring = Docstring(found[1], lineno=attr.lineno, parent=attr)
