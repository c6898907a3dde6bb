# make demo   the whole way once, on this machine: install, data, training, evaluation, picture
# make test   install, then every check that .ci/run does
.PHONY: setup demo test check pytest bench clean

PYTHON ?= python3
BIN := .venv/bin
DATA ?= emoji
RANKS ?= 2
RUN ?= runs/$(DATA)

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,demo]'
	touch $@

demo: setup data-$(DATA)
	$(BIN)/clipscale train configs/$(DATA).toml --out $(RUN) --ranks $(RANKS) --auto-resume
	$(BIN)/clipscale eval all $(RUN) --sheet $(RUN)/sheet.png

.PHONY: data-emoji data-toy
data-emoji: setup
	$(BIN)/clipscale data fetch emoji --out data/emoji

data-toy: setup
	$(BIN)/clipscale data toy --out data/toy-demo --samples 20000 --shards 8 --held-out 512

test: setup check pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

pytest: setup
	$(BIN)/pytest -n 2 --dist loadfile # many tests start ranks of their own: more at a time only get in each other's way

bench: setup
	mkdir -p bench
	$(BIN)/python scripts/bench_data.py --quick
	$(BIN)/python scripts/bench_step.py --plot bench/step.png
	$(BIN)/python scripts/bench_loss.py --plot bench/loss.png
	$(BIN)/python scripts/bench_optim.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
