"""Shows the comment behind a field as the field's words, in the reference: our columns have their shapes there."""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension

COMMENT = re.compile(r".*?  # (.+)")


class FieldComments(Extension):
    """Takes the comment on the first line of a class's attribute where that has no docstring."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Gives the attribute its comment."""
        is_field = attr.docstring is None and attr.parent is not None and attr.parent.is_class
        if is_field and (found := COMMENT.fullmatch(attr.source.partition("\n")[0])):
            attr.docstring = Docstring(found[1], lineno=attr.lineno, parent=attr)
