# Everything that a newcomer needs: `make demo` shows it, `make test` checks it. Both make .venv first.
PYTHON ?= python3
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
RUN := .venv/bin/

.PHONY: demo test clean

demo: .venv/demo
	mkdir -p demo
	$(RUN)placewise capture nmt:layers=2 -o demo/nmt2.json.gz
	$(RUN)placewise info demo/nmt2.json.gz --cluster 2xK80
	@echo
	$(RUN)placewise place demo/nmt2.json.gz --cluster 2xK80 -o demo/plan.json
	@echo
	$(RUN)placewise simulate demo/nmt2.json.gz --cluster 2xK80 --plan demo/plan.json --trace demo/trace.json
	@echo "demo/trace.json shows the timeline: open it in ui.perfetto.dev"

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
	rm -rf .venv build dist src/*.egg-info
