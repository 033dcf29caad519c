# For newcomers: `make demo` shows placewise at work, `make test` checks it, `make docs` builds its docs. All create .venv first.
PYTHON ?= python3
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
RUN := .venv/bin/

.PHONY: demo docs test clean

demo: .venv/demo
	mkdir -p demo
	$(RUN)placewise capture nmt:layers=2 -o demo/nmt2.json.gz
	@echo
	$(RUN)placewise place demo/nmt2.json.gz --cluster 2xK80 --budget 200 -o demo/plan.json --report demo/page.html
	@echo
	@echo "The page of this plan: file://$(CURDIR)/demo/page.html"

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs build --strict
	@echo "The docs: file://$(CURDIR)/site/index.html (search works only with $(RUN)mkdocs serve)"

test: .venv/dev
	@scripts/chromium
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
	rm -rf .venv build demo dist site src/*.egg-info
