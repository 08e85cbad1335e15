# make         set up .venv, check every operator that this machine can run, write the report and say where
# make test    set up likewise and pass the test suite
# make check   format, lint, types, import floors, exports, documentation
# make docs    build the documentation as a site: build/site/index.html
# make bench   verify, then time beside peers (needs a GPU for most rows)
# make wheel   a wheel for every Linux with glibc 2.28 or newer, and the sdist, into dist/
#
# Works from anywhere with `make -C`; the checkout's path may hold spaces.

REPORT ?= $(CURDIR)/build/verify.html
# one more than two cores: a quarter of the time of two workers was spent waiting for processes and clocks
WORKERS ?= 3
PYTEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: verify test check docs bench wheel setup

verify: setup
	@mkdir -p "$$(dirname "$(REPORT)")"
	@.venv/bin/goldsmith verify --html "$(REPORT)"
	@printf '\nNext: activate the environment in this shell, then use the command.\n\n'; \
	printf "  . '%s/.venv/bin/activate'\n" "$(CURDIR)"; \
	printf '  %-24s%s\n' 'goldsmith doctor' 'what runs on this machine' \
	    'goldsmith verify --help' 'check an operator, or a kernel of your own: docs/verify-your-own-kernel.md'

test: setup
	@.venv/bin/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

check: setup
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m ruff check .
	@.venv/bin/clang-format --dry-run --Werror csrc/*.* csrc/*/*.* csrc/*/*/*.*
	@.venv/bin/python -m mypy
	@.venv/bin/python -m pytest -n $(WORKERS) -q tests/repo --ignore tests/repo/test_style.py

docs: setup
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet
	@echo "The documentation: $(CURDIR)/build/site/index.html"

bench: setup
	@.venv/bin/python -m benchmarks.bench $(BENCH_ARGS)

wheel: setup
	@.venv/bin/python scripts/wheel.py

# Decides by content, not by date, whether anything is to be installed; half a second when not.
setup:
	@sh scripts/setup.sh
