# Everything that a newcomer needs: `make demo` shows it, `make test` checks it. Both make .venv first.
PYTHON ?= python3
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
RUN := .venv/bin/

.PHONY: demo test clean

demo: .venv/demo
	$(RUN)placewise info nmt:layers=2 --cluster 2xK80

test: .venv/dev
	scripts/check

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(RUN)pip install --quiet --editable .[torch]
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	$(RUN)pip install --quiet --editable .[torch,dev]
	touch $@ .venv/demo

clean:
	rm -rf .venv build dist src/*.egg-info
