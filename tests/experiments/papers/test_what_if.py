"""placewise reproduce --what-if: the machines on which a claim would hold."""

from dataclasses import replace

import pytest
from captured import GOLDEN
from command_line import refused

from placewise.cli import main
from placewise.experiments.papers import what_if as module
from placewise.experiments.papers.claims import Claim
from placewise.experiments.papers.reported_results import PAPERS, POST, PaperRow
from placewise.experiments.papers.reproduction import Effort, Machines
from placewise.experiments.papers.what_if import BEST_RULE, FACTORS, LAUNCHES, ClaimRatios, what_if, what_if_table

CAPTURED = str(GOLDEN / "captured.json.gz")
ROW = PaperRow("net", 2, CAPTURED, "2xK80", {}, CAPTURED)
CLAIM = Claim("post", "Metis takes more than twice the time of one GPU", of="Metis", to="single GPU", least=2.0)


def answer(*ratios: float | None) -> ClaimRatios:
    """Returns an answer with these ratios for factors."""
    return ClaimRatios(CLAIM, ROW, "Metis", ratios, (1.0, 1.0, 3.0), 0.4)


def test_a_claim_holds_from_a_factor_on() -> None:
    """It must hold for that factor and all larger ones: here for 8 and more, though for 2 as well."""
    found = answer(1.0, 2.5, 1.9, 2.0, 3.0, 4.0, 5.0)
    assert (found.holds_from, found.holds_from_launch) == (8.0, 1e-3)
    assert answer(3.0, 2.5, 1.9, 2.0, 3.0, 4.0, 1.0).holds_from is None
    assert answer(2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0).holds_from == 1.0
    assert answer(2.0, 2.0, None, 2.0, 2.0, 2.0, 2.0).holds_from == 8.0


def test_only_claims_on_columns_that_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = replace(CLAIM, of="Post", to="PPO")
    by_proxy = replace(CLAIM, of="Post", to="single GPU", least=0.0, below=1.0)
    monkeypatch.setattr(module, "CLAIMS", (CLAIM, searched, by_proxy))
    found = what_if(replace(POST, rows=(ROW,)), Effort(seeds=1))
    assert [one.of for one in found] == ["Metis", BEST_RULE]
    for one in found:
        assert (len(one.ratios), len(one.launch_ratios)) == (len(FACTORS), len(LAUNCHES))
        assert one.least_ratio is not None
        assert one.ratios[0] is not None
        assert one.least_ratio <= one.ratios[0]
    slow = what_if(replace(POST, rows=(ROW,)), Effort(seeds=1), machines=Machines(slower_links=2.0))
    assert slow[0].ratios[:3] == pytest.approx([r for r in found[0].ratios[1:4] if r])
    header, lines = what_if_table(found)
    assert len(header) == len(lines[0]) == 3 + len(FACTORS) + len(LAUNCHES) + 2


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(PAPERS, "post", replace(POST, rows=(replace(ROW, family="RNNLM"),)))
    command = ["reproduce", "post", "--what-if", "--seeds", "1"]
    assert main(command) == 0
    assert "RNNLM is best on one GPU" in capsys.readouterr().out
    assert "--budget can't be used with --what-if, which does not search" in refused([*command, "--budget", "3"], capsys)
    assert "--what-if can't be used with changes" in refused(["reproduce", "changes", "--what-if"], capsys)
    for option in (["--what-if"], ["--columns", "Post"], ["--seeds", "1"], ["--slower-links", "2"], ["--calibrated"]):
        assert f"{option[0]} can't be used with calibrate" in refused(["reproduce", "calibrate", *option], capsys)
