"""The command line: what it prints, and what it refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_cluster, tiny_data, tiny_graph
from command_line import on_a_terminal, refused

from placewise import __version__
from placewise.cli import main
from placewise.experiments.bench import find_benchmarks
from placewise.formats.cluster_file import parse_cluster, read_cluster, write_cluster
from placewise.formats.graph_file import read_graph
from placewise.machines.presets import PRESETS, preset
from placewise.zoo import MODELS

SMALL = "rnnlm:layers=1,hidden=4,steps=2,batch=2,vocab=5"
COMMANDS = ("models", "clusters", "capture", "info", "detect", "bench", "completion")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns what a command that must succeed prints, which is nothing on standard error."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Returns the one JSON object that a command prints."""
    data = json.loads(printed(capsys, *arguments, "--json"))
    assert isinstance(data, dict)
    return data


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "placewise", *arguments], capture_output=True, text=True, check=False, **options
    )


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(tiny_data()))
    return str(path)


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    write_cluster(tiny_cluster(), tmp_path / "tiny.toml")
    return str(tmp_path / "tiny.toml")


# --- lists ---


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "models")
    for name, entry in MODELS.items():
        assert f"\n{name} " in f"\n{text}"
        assert entry.summary in text
    data = printed_json(capsys, "models")
    assert list(data) == list(MODELS)
    assert data["rnnlm"]["options"]["micro_batches"] == 1


def test_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "clusters").splitlines()
    presets, catalogue = lines[1 : 1 + len(PRESETS)], lines[2 + len(PRESETS) :]
    assert [line.split()[0] for line in presets] == list(PRESETS)
    assert "3090" in {line.split()[0] for line in catalogue if line}
    speeds = {words[0]: words[1] for line in presets if (words := re.split("  +", line))}
    assert speeds["2xK80"] == "float32 3.06"
    assert speeds["4xV100-nvlink"] == "float32 11, float16 87.5"
    assert speeds["8xA100-nvlink"] == "float32 13.7, tf32 109, bfloat16 218"
    assert speeds["4090+3060"] == "float32 57.8, bfloat16 116"
    data = printed_json(capsys, "clusters")
    assert list(data) == list(PRESETS)
    assert data["8xA100-nvlink"]["devices"][0]["flops_by_type"]["tf32"] == pytest.approx(109.2e12)


def test_one_cluster_is_printed_as_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "clusters", "2xK80")
    assert parse_cluster(tomllib.loads(text)).digest == preset("2xK80").digest
    data = printed_json(capsys, "clusters", "2xK80")
    assert (data["name"], len(data["devices"])) == ("2xK80", 3)


@pytest.mark.parametrize(("name", "hint"), [("2xk80", "did you mean '2xK80'?"), ("nothing", "expected one of 1xK40, ")])
def test_an_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str], name: str, hint: str) -> None:
    assert f"unknown preset {name!r}: {hint}" in refused(["clusters", name], capsys)


# --- capture ---


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_capture_writes_a_graph_that_info_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = str(tmp_path / name)
    facts = printed_json(capsys, "capture", SMALL, "-o", path)
    graph = read_graph(path)
    assert os.listdir(tmp_path) == [name]
    assert facts == {
        "file": path,
        "name": SMALL,
        "digest": graph.digest,
        "ops": len(graph.ops),
        "tensors": len(graph.tensors),
        "groups": graph.num_groups,
    }
    assert set(graph.ops.phases.tolist()) == {0, 1, 2}
    info = printed_json(capsys, "info", path)
    assert (info["digest"], info["num_ops"]) == (graph.digest, len(graph.ops))


def test_capture_says_what_it_wrote_and_takes_a_graph_file_too(
    tmp_path: Path, graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "copy.json.gz"
    assert printed(capsys, "capture", graph_file, "--output", str(path)) == f"{path}: 4 ops, 6 tensors, 3 groups\n"
    assert read_graph(path).digest == tiny_graph().digest


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "nothing",
            "nothing: is neither a file, nor a function (package.module:function or path/to/file.py:",
        ),
        ("", "model: must not be empty"),
        ("no such\nmodel", "no such\\nmodel: is neither a file"),
        ("rnnlm:", "model 'rnnlm': each option must be name=value"),
        ("rnnlm:layers", "model 'rnnlm': each option must be name=value, got 'layers'"),
        ("rnnlm:layers=", "model 'rnnlm': each option must be name=value"),
        ("rnnlm:layers=0", "model 'rnnlm': option 'layers' must be from 1"),
        ("rnnlm:layers=-1", "model 'rnnlm': option 'layers' must be from 1"),
        ("rnnlm:layers=two", "model 'rnnlm': option 'layers' must be a whole number, got two"),
        ("rnnlm:layers=1.5", "model 'rnnlm': option 'layers' must be a whole number, got 1.5"),
        ("rnnlm:layers=1,layers=2", "model 'rnnlm': option 'layers' must be given once"),
        ("rnnlm:colour=red", "model 'rnnlm': unknown option 'colour': expected one of"),
        ("rnnlm:batch=4,micro_batches=3", "model 'rnnlm': option 'micro_batches' must divide the batch of 4, got 3"),
        ("resnet:depth=51", "model 'resnet': option 'depth' must be one of 50, 101"),
        ("no.such.module:function", "model 'no.such.module:function': ModuleNotFoundError"),
        ("json:nothing", "model 'json:nothing': there is no function 'nothing' in json: expected one of "),
        ("json:load_", "model 'json:load_': there is no function 'load_' in json: did you mean 'load'?"),
        ("rnnml:layers=2", "nor a model of the zoo: did you mean 'rnnlm'?"),
        ("os:getcwd", "model 'os:getcwd': must return (model, loss_fn, optimizer, example_batch)"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, message: str) -> None:
    path = tmp_path / "graph.json"
    assert message in refused(["capture", model, "-o", str(path)], capsys)
    assert message in refused(["info", model], capsys)
    assert not path.exists()


@pytest.mark.parametrize("command", [["capture", "nothing"], ["detect"]])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """The model does not exist either: the output is refused first."""
    missing = tmp_path / "no" / "out.json"
    assert refused([*command, "-o", str(missing)], capsys) == (
        f"placewise: {missing}: can't be written: there is no folder {missing.parent}\n"
    )
    assert "can't be written: it is a folder" in refused([*command, "-o", str(tmp_path)], capsys)
    (tmp_path / "file").write_text("")
    assert "there is no folder" in refused([*command, "-o", str(tmp_path / "file" / "out.json")], capsys)
    assert "can't be written" in refused([*command, "-o", str(tmp_path / ("n" * 5000) / "out.json")], capsys)
    assert "can't be written: File name too long" in refused([*command, "-o", str(tmp_path / ("n" * 300))], capsys)
    assert "can't be written: embedded null byte" in refused([*command, "-o", str(tmp_path / "a\0b")], capsys)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_may_not_be_written_to_is_refused(
    tmp_path: Path, graph_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    message = refused(["capture", graph_file, "-o", str(tmp_path / "out.json")], capsys)
    assert f"can't be written: no permission to write to {tmp_path}" in message


# --- info ---


def test_info_by_hand(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "info", graph_file)
    for line in (
        "tiny",
        "4 ops in 3 groups, 6 tensors",
        "0flop, 0 B moved",
        "resident: input 1000 B, parameter 3.91 KiB",
        "work 10 ms, critical path 10 ms (a device of 10 Tflop/s and 500 GB/s)",
        "parallelism 1.00: more such devices give at most this speed-up",
        "4 levels, the widest has 1 ops",
    ):
        assert line in text.splitlines()
    assert "aten.mm      2" in text
    assert "\x1b" not in text


def test_info_with_a_cluster_shows_each_devices_time(
    graph_file: str, cluster_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "info", graph_file, "--cluster", cluster_file)
    assert f"(each op on its fastest device of {cluster_file})" in text
    assert [line.split() for line in text.splitlines()[-2:]] == [["gpu:0", "10", "ms"], ["gpu:1", "10", "ms"]]
    data = printed_json(capsys, "info", graph_file, "--cluster", cluster_file)
    assert data["device_seconds"] == {"gpu:0": pytest.approx(0.01), "gpu:1": pytest.approx(0.01)}


def test_info_says_which_share_of_the_flops_is_in_which_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tiny_data()
    for row, (flops, compute) in zip(
        data["ops"], [(10, "float32"), (760, "bfloat16"), (200, "bfloat16"), (30, "tf32")], strict=True
    ):
        row |= {"flops": flops, "compute": compute}
    (tmp_path / "graph.json").write_text(json.dumps(data))
    text = printed(capsys, "info", str(tmp_path / "graph.json"))
    assert "1 kflop (96.0% in bfloat16, 3.0% in tf32, 1.0% in float32), 0 B moved" in text.splitlines()


def test_info_as_json(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = printed_json(capsys, "info", graph_file)
    assert (data["name"], data["digest"], data["device_seconds"]) == ("tiny", tiny_graph().digest, {})
    assert data["ops_by_kind"] == {"aten.mm": 2, "aten.add_": 1, "aten.relu": 1}


def test_info_lists_as_many_kinds_as_asked_for(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "info", graph_file, "--kinds", "1")
    assert [line.split() for line in text.splitlines()[-2:]] == [["aten.mm", "2"], ["2", "more", "kinds", "2"]]
    for wrong in ("-1", "x", "1.5", "9" * 5000):
        with pytest.raises(SystemExit) as caught:
            main(["info", graph_file, f"--kinds={wrong}"])
        assert caught.value.code == 2
        rule = "have at most 18 digits, got 5000" if len(wrong) > 18 else f"be a whole number, 0 or more, got '{wrong}'"
        assert f"--kinds: must {rule}" in capsys.readouterr().err


def test_info_of_an_empty_graph(tmp_path: Path, cluster_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"format": "placewise-graph", "version": 1, "tensors": [], "ops": []}')
    assert "0 ops in 0 groups, 0 tensors\n" in printed(capsys, "info", str(path))
    assert printed_json(capsys, "info", str(path), "--cluster", cluster_file)["parallelism"] == 0


def test_an_op_that_the_cluster_cannot_run_is_refused(
    tmp_path: Path, cluster_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tiny_data()
    data["ops"][2]["devices"] = ["cpu"]
    (tmp_path / "graph.json").write_text(json.dumps(data))
    message = refused(["info", str(tmp_path / "graph.json"), "--cluster", cluster_file], capsys)
    assert "graph 'tiny' on cluster 'tiny': no device can run the group of ops[2] 'mm.backward'" in message


def test_a_name_that_no_terminal_can_show_is_shown_somehow(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps({**tiny_data(), "name": "odd \ud800 µ"}))
    for encoding in ("utf-8", "ascii"):
        result = process("info", str(tmp_path / "graph.json"), env=os.environ | {"PYTHONIOENCODING": encoding})
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("odd \\ud800 ")


# --- detect, completion ---


def test_detect_prints_and_writes_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = parse_cluster(tomllib.loads(printed(capsys, "detect")))
    assert cluster.device_names[-1] == "cpu:0"
    path = tmp_path / "here.toml"
    assert printed(capsys, "detect", "-o", str(path)) == f"{path}: {cluster.description}\n"
    assert read_cluster(path).digest == cluster.digest
    assert printed_json(capsys, "detect")["name"] == "detected"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    script = printed(capsys, "completion", shell)
    assert all(command in script for command in COMMANDS)
    if shell == "bash" and (bash := shutil.which("bash")):
        subprocess.run([bash, "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("bench s", "scale scale-out setups simple simulate speed start suite"),
        ("bench scale-out --d", "--delay"),
        ("bench rows --d", ""),
    ],
)
def test_bash_completes_benchmarks_and_their_options(capsys: pytest.CaptureFixture[str], words: str, offered: str) -> None:
    script = printed(capsys, "completion", "bash")
    (function,) = re.findall(r"^complete .*-F (\w+) placewise$", script, re.MULTILINE)
    typed = f"COMP_WORDS=(placewise {words}); COMP_CWORD={len(words.split())}; {function} placewise; echo ${{COMPREPLY[@]}}"
    result = subprocess.run(["bash"], input=f"{script}\n{typed}\n", capture_output=True, text=True, check=True)
    assert result.stdout.split() == offered.split()


# --- the command as a whole ---


def test_python_m_placewise_and_the_version() -> None:
    result = process("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"placewise {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["conquer"], "placewise: unknown command 'conquer': expected one of place, advise, "),
        (["plase"], "placewise: unknown command 'plase': did you mean 'place'?"),
        (["bench", "mesured"], "placewise bench: unknown benchmark 'mesured': did you mean 'measured'?"),
        (["info", "m", "--clutser", "2xK80"], "placewise info: unknown option --clutser: did you mean '--cluster'?"),
        (["place", "m", "--clutser=2xK80"], "placewise place: unknown option --clutser: did you mean '--cluster'?"),
        (
            ["place", "m", "--cluster", "c", "--order", "prority"],
            "argument --order: unknown value 'prority': did you mean 'priority'?",
        ),
        (["--fast"], "the following arguments are required: COMMAND"),
        (["models", "--fast"], "unrecognized arguments: --fast"),
        (["models", "two\nlines"], "unrecognized arguments: two\\nlines"),
        (["capture", SMALL], "the following arguments are required: -o/--output"),
        (["info"], "the following arguments are required: MODEL"),
        (["completion", "fish"], "argument shell: unknown value 'fish': expected one of bash, zsh, tcsh"),
        (["bench"], "placewise bench: the following arguments are required: BENCHMARK"),
        (["bench", "everything"], "placewise bench: unknown benchmark 'everything': expected one of "),
        (["bench", "execute", "--seconds", "3"], "placewise bench execute: unrecognized arguments: --seconds 3 "),
        (["bench", "measured", "m", "c", "--quick"], "placewise bench measured: unrecognized arguments: --quick "),
        (["bench", "capture", "--keep", "d"], "placewise bench capture: unrecognized arguments: --keep "),
        (["bench", "rows", "--ray=local"], "placewise bench rows: unrecognized arguments: --ray=local "),
        (["bench", "suite", "--virtual", "cuda:0=4"], "placewise bench suite: unrecognized arguments: --virtual "),
        (["bench", "scale-out", "--workers", "2"], "placewise bench scale-out: unrecognized arguments: --workers "),
        (["place", "nmt", "--cluster", "2xK80", "--budget", "-3"], "--budget: must be a whole number above 0, got '-3'"),
        (["bench", "execute", "nmt"], "placewise bench execute: unrecognized arguments: nmt "),
        (["bench", "curve", "nmt", "2xK80", "4xK80"], "placewise bench curve: unrecognized arguments: 4xK80 "),
        (["bench", "measured", "nmt"], "placewise bench measured: the following arguments are required: CLUSTER"),
        (
            ["place", "nmt", "--cluster", "2xK80", "--seed", "1" + "0" * 30],
            "--seed: must have at most 18 digits, got 31",
        ),
        (
            ["compare", "nmt", "--cluster", "2xK80", "--seeds", "9" * 5000],
            "--seeds: must have at most 15 digits, got 5000",
        ),
    ],
)
def test_a_wrong_call_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out) == (2, "")
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: placewise {command}")


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns a command's help as one line, which no width of the terminal cuts."""
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", find_benchmarks())
def test_a_benchmark_says_its_own_options_and_bench_lists_all(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert f" {name} {find_benchmarks()[name].summary()} " in helped(capsys, "bench")
    text = helped(capsys, "bench", name)
    assert text.startswith(f"usage: placewise bench {name} ")
    owners = {
        "--markdown": ("neural", "rows", "suite"),
        "--seconds S": ("gap", "hosts", "measured", "memory", "placeto", "policy", "predictions", "rows", "simple"),
        "--budget N": ("measured", "neural", "predictions", "rows", "suite", "scale-out"),
        "--keep DIR": ("measured",),
        "--workers N": ("suite",),
        "--delay S": ("hosts", "scale-out"),
        "MODEL": tuple(
            other for other in find_benchmarks() if other not in ("start", "scale", "execute", "setups", "memory")
        ),
    }
    assert [option for option in owners if option in text] == [option for option, names in owners.items() if name in names]


def test_help_says_what_set_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--set NAME=VALUE set a parameter of the strategy, as in crossover=uniform " in helped(capsys, "place")
    words = "--set STRATEGY.NAME=VALUE set a parameter of a strategy, as in genetic.crossover=uniform "
    assert words in helped(capsys, "compare")


def test_colours_are_for_terminals_that_want_them(graph_file: str) -> None:
    assert on_a_terminal("info", graph_file).startswith("\x1b[1mtiny\x1b[0m")
    assert "\x1b" not in on_a_terminal("info", graph_file, NO_COLOR="1")
    assert "\x1b" not in process("info", graph_file).stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "placewise", "clusters", "8xK40"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, b"")  # as other tools


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("placewise.machines.detect.detect", interrupt)
    assert main(["detect"]) == 130
    assert capsys.readouterr().err == "placewise: stopped\n"
