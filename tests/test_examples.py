"""Every script of examples/ runs in its own process, with warnings as errors."""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import script_command

FOLDER = Path(__file__).parents[1] / "examples"
NUMBER = r"([0-9.]+)"


def is_faster_than_one_gpu(printed: str) -> None:
    assert " ms a step on 4090+3060, at most " in printed
    assert float(find(rf"the best single GPU takes {NUMBER} ms, {NUMBER} times as long", printed)[1]) >= 1


def has_learned(printed: str) -> None:
    groups = {device: int(count) for device, count in re.findall(r"(cpu:[01]) +(\d+) groups", printed)}
    assert set(groups) == {"cpu:0", "cpu:1"}
    assert min(groups.values()) > 0, "both devices have work"
    first, last = find(rf"loss {NUMBER} before the first step, {NUMBER} before the last", printed)
    assert float(last) < float(first) / 2
    assert int(find(r"(\d+)% are right", printed)[0]) > 50


def is_above_the_bound(printed: str) -> None:
    bound = float(find(rf"no placement takes less than {NUMBER} ms", printed)[0])
    rows = re.findall(rf"^([a-z-]+) +{NUMBER} ms +{NUMBER} ms +(\d+)$", printed, re.MULTILINE)
    assert len(rows) == 6
    for name, best, worst, evaluations in rows:
        assert bound <= float(best) <= float(worst), name
        assert 1 <= int(evaluations) <= 200, name


def has_found_more_than_one_gpu(printed: str) -> None:
    rows = re.findall(rf"^([a-z-]+) +{NUMBER} ms after (\d+) evaluations$", printed, re.MULTILINE)
    found = {name: float(milliseconds) for name, milliseconds, _ in rows}
    assert found["spans"] < found["gpu-only"]


def trains_like_eager_code(printed: str) -> None:
    assert float(find(r"largest difference ([0-9.e-]+)", printed)[0]) < 0.01
    if "evaluation" in printed:
        assert "the losses are the same: True" in printed


def fits_and_trains_like_eager_code(printed: str) -> None:
    share, times = find(rf"with {NUMBER}% of the memory \(options \d+\) {NUMBER} times as long", printed)
    assert int(share) < 100
    assert float(times) < 2
    assert float(find(r"largest difference ([0-9.e-]+)", printed)[0]) < 0.01


def generates_the_same(printed: str) -> None:
    assert "the tokens are those of generate: True" in printed


def trains_and_learns(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(rf"^step \d+: loss {NUMBER}$", printed, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]


CHECKS: dict[str, Callable[[str], None]] = {
    "train_over_hosts": trains_and_learns,
    "train_a_language_model": trains_like_eager_code,
    "trainer_of_transformers": trains_like_eager_code,
    "finetune_by_lora": fits_and_trains_like_eager_code,
    "lightning_module": trains_like_eager_code,
    "generate_with_a_static_cache": generates_the_same,
    "transformers_on_a_mixed_machine": is_faster_than_one_gpu,
    "train_your_own_model": has_learned,
    "compare_strategies": is_above_the_bound,
    "your_own_strategy": has_found_more_than_one_gpu,
}


def find(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    assert found is not None, text
    return tuple(found.groups())


def test_every_example_is_run() -> None:
    assert set(CHECKS) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", CHECKS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    for package in ("transformers", "peft", "lightning"):
        if f"pip install {package}" in (FOLDER / f"{name}.py").read_text() and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = script_command(FOLDER / f"{name}.py", "-W", "error")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    CHECKS[name](done.stdout)
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_a_strategy_of_your_own_has_at_most_20_lines() -> None:
    tree = ast.parse((FOLDER / "your_own_strategy.py").read_text(encoding="utf-8"))
    (strategy,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    first = min(strategy.lineno, *(decorator.lineno for decorator in strategy.decorator_list))
    assert strategy.end_lineno is not None
    assert strategy.end_lineno - first < 20
