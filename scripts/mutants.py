"""Plants small bugs in a copy of the tree, one at a time, and runs the tests that should fail.

    python scripts/mutants.py                 all of them; a survivor is a bug that no test notices
    python scripts/mutants.py --only kernels  those with this word in their file's name or their line
    python scripts/mutants.py --part 2/5      the second of five parts that together are all of them

A mutant is a line that is searched for and what replaces it. One that no longer applies says so, and a test notices.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

MOST_SECONDS = 600.0  # of the tests of one mutant

HANG_SECONDS, HANG_TIMES = 60.0, 5  # tests that take this and so many times as long as without a bug hang: it is caught


class Mutant(NamedTuple):
    """A planted bug: in this file of src/placewise, `old` becomes `new`, and these tests should fail."""

    file: str
    old: str
    new: str
    tests: str


SIMULATE, WAITS = "tests/simulate/test_simulator.py", "tests/run/lower"
STORE, DAMAGED = "tests/search/test_store.py", "tests/search/test_damaged_run_files.py"
DRIVER, CACHED, POOL = "tests/search/test_driver.py", "tests/evaluate/test_cached.py", "tests/evaluate/test_pool.py"
LEARNED, IMPORTERS, BOUNDS = "tests/strategies/learned", "tests/formats/test_importers.py", "tests/bounds/test_bounds.py"
DAG = "tests/bounds/test_dag.py"
PAGE, AUTO = "tests/report/page", "tests/strategies/auto/test_auto.py"
COMPOSED, DISTURBED = "tests/machines/test_composed.py", "tests/simulate/test_disturbances.py"
CHECKS = "tests/measure/test_prediction_checks.py"
HOSTS, ATTENTION = "tests/run/backends/test_hosts.py", "tests/graph_capture/test_whole_passes.py"
OPTIONS, PROGRAM = "tests/rewrite/test_augmented_graph.py", "tests/rewrite/test_augmented_program.py"
FUSE, NEIGHBOURS = "tests/rewrite/test_fuse.py", "tests/run/lower/test_neighbours.py"
PLANS, CHOICES = "tests/rewrite/test_options_in_plans.py", "tests/simulate/test_choices.py"
POLICY, TEACHING = "tests/strategies/learned/test_graph_policy.py", "tests/experiments/policy/test_teaching.py"
RECURRENT, FAILED = "tests/graph_capture/test_recurrent_layers.py", "tests/run/step/test_failed_steps.py"
DIRECT, STREAMED = "tests/run/codegen/test_direct_functions.py", "tests/strategies/options/test_streamed.py"
OPTIONAL, RAGGED = "tests/simulate/test_simulator.py tests/core/test_graph.py", "tests/training/test_planned_steps.py"

MUTANTS = (
    Mutant("simulate/kernels.py", "if launch_at[place] < first:", "if launch_at[place] <= first:", AUTO),
    Mutant(
        "simulate/kernels.py",
        "begin = max(begin, busy[channel], busy[second])",
        "begin = max(begin, busy[second])",
        SIMULATE,
    ),
    Mutant("simulate/kernels.py", "busy[channel] = left\n", "busy[channel] = begin\n", SIMULATE),
    Mutant("simulate/kernels.py", "begin = max(begin, ends[maker])", "begin = ends[maker]", SIMULATE),
    Mutant("simulate/kernels.py", "busy[second] = left\n", "pass\n", SIMULATE),
    Mutant("simulate/kernels.py", "hosts[sender] += copy_dispatch", "pass", SIMULATE),
    Mutant("simulate/kernels.py", "begin = max(begin, hosts[sender])", "pass", SIMULATE),
    Mutant("simulate/kernels.py", "start = max(start, ends[after_ops[after]])", "start = max(start, 0.0)", SIMULATE),
    Mutant("simulate/kernels.py", "last_use[read_storages[read]] = ~position", "pass", SIMULATE),
    Mutant("simulate/kernels.py", "copy_last_use[place] = position\n", "pass\n", SIMULATE),
    Mutant("simulate/kernels.py", "return free.max(), num_copies", "return max(free[0], end), num_copies", SIMULATE),
    Mutant("simulate/kernels.py", "used[devices[g]] += resident_bytes[g]", "used[devices[g]] = resident_bytes[g]", SIMULATE),
    Mutant("simulate/kernels.py", "work.launch_at[work.launched[i]] = UNLAUNCHED", "pass", SIMULATE),
    Mutant("run/lower/waits.py", "needs += [ran[earlier] for earlier in after[op] if earlier in ran]", "pass", WAITS),
    Mutant("run/lower/waits.py", "last_draw = number", "last_draw = -1", WAITS),
    Mutant("run/lower/waits.py", "if makers[tensor] >= 0 and makers[tensor] in ran else []", "if False else []", WAITS),
    Mutant("run/lower/waits.py", ".get(source_queue, -1) >= source for", ".get(source_queue, -1) >= 0 for", WAITS),
    Mutant("run/lower/waits.py", "known[other] = max(last, known.get(other, -1))", "known[other] = last", WAITS),
    Mutant("run/lower/lowering.py", "and (tensor, here) not in copied:", "and True:", WAITS),
    Mutant("run/lower/lowering.py", "last_use[storage, there, False] = position", "pass", WAITS),
    Mutant(
        "run/lower/lowering.py",
        "last_use[tensor, here, True] = position\n",
        "last_use.setdefault((tensor, here, True), position)\n",
        WAITS,
    ),
    Mutant(
        "run/lower/lowering.py",
        "last_use[storages[tensor], here, False] = position",
        "last_use[tensor, here, False] = position",
        WAITS,
    ),
    Mutant("run/lower/lowering.py", "if is_copy or tensor not in kept:", "if True:", WAITS),
    Mutant("run/lower/check_instructions.py", "if self.storages[tensor] in self.freed:", "if False:", WAITS),
    Mutant("run/lower/check_instructions.py", "if rest := self.made - self.kept:", "if rest := set():", WAITS),
    Mutant("bounds/longest_path.py", "least = longest.min(axis=1)", "least = longest.max(axis=1)", BOUNDS),
    Mutant("bounds/longest_path.py", "through = heads + dag.seconds + tails", "through = heads + tails", BOUNDS),
    Mutant("bounds/longest_path.py", "kept.add(source)", "pass", BOUNDS),
    Mutant("bounds/shared_work.py", "np.where(self.problem.allowed[:, self.firsts], work, np.inf)", "work", BOUNDS),
    Mutant("bounds/dag.py", "classes = refined", "return np.array(classes)", DAG),
    Mutant("bounds/dag.py", "if not best or rate < best[-1][1]:", "if not best:", DAG),
    Mutant("bounds/dag.py", "here == there else np.flat", "True else np.flat", DAG),
    Mutant("bounds/shared_work.py", "allowed[label] = can", "allowed[:] = True", DAG),
    Mutant("bounds/check/certificates.py", "seconds <= proved * (1 + TOLERANCE)", "seconds <= proved * 2", BOUNDS),
    Mutant("search/driver.py", "np.where(fits, evaluation.cost, np.inf).argmin()", "evaluation.cost.argmin()", DRIVER),
    Mutant("search/driver.py", "if evaluation.cost[row] < self.cost:", "if evaluation.cost[row] <= self.cost:", DRIVER),
    Mutant("search/driver.py", "budget.evaluations - spent)", "budget.evaluations)", DRIVER),
    Mutant("search/driver.py", "if batch.digest != _digest(proposal):", "if False:", DRIVER),
    Mutant("search/driver.py", "spent - best.found_at >= budget.patience", "spent >= budget.patience", DRIVER),
    Mutant("search/store.py", "self._count += 1", "self._count += 2", STORE),
    Mutant("search/store.py", "self._count, self._last = self.info.batches,", "self._count, self._last = 0,", STORE),
    Mutant("search/store.py", "if found != expected:", "if False:", DAMAGED),
    Mutant("search/store.py", "os.O_CREAT | os.O_NOFOLLOW |", "os.O_CREAT |", DAMAGED),
    Mutant("search/store.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", STORE),
    Mutant("search/store.py", "if problem.digest != digest:", "if False:", f"{STORE} {DAMAGED}"),
    Mutant("search/run_rows.py", "if specification.key != key:", "if False:", f"{STORE} {DAMAGED}"),
    Mutant("evaluate/cached.py", "if orders is None or shared else orders[rows]", "if True else orders[rows]", CACHED),
    Mutant("evaluate/cached.py", "self._rows.popitem(last=False)", "self._rows.popitem(last=True)", CACHED),
    Mutant("evaluate/pool.py", "self.waiting.insert(0, number)", "pass", POOL),
    Mutant("evaluate/pool.py", "for number in sorted(self.answers)", "for number in self.answers", POOL),
    Mutant("report/page/html.py", '.replace("<", "\\\\u003c")', "", PAGE),
    Mutant("report/page/page_data.py", "in_use[schedule.order] = schedule.memory", "in_use[:] = schedule.memory", PAGE),
    Mutant("report/page/page_data.py", "pack(t.copy_end - t.copy_start,", "pack(t.copy_end,", PAGE),
    Mutant("report/page/page_data.py", "reversed(shown)}  # of each", "shown[:1]}  # of each", PAGE),
    Mutant("report/page/page_data.py", '"u2" if len(number) <= 2**16 else "i4"', '"u2"', PAGE),
    Mutant("formats/importers/pipedream.py", "gradient[i, j] for j in after[i]] or [i]", "i]", IMPORTERS),
    Mutant("formats/importers/pipedream.py", "forward_seconds + layer.backward_seconds", "forward_seconds", IMPORTERS),
    Mutant("formats/importers/dnn_partitioning.py", "rest_bytes -= output_bytes", "pass", IMPORTERS),
    Mutant("formats/importers/dnn_partitioning.py", "kept += writes[n]", "pass", IMPORTERS),
    Mutant("strategies/learned/maths.py", "weights[1:] *= 1 - decay", "weights *= 1 - decay", LEARNED),
    Mutant("strategies/learned/maths.py", "better = baseline - seconds", "better = seconds - baseline", LEARNED),
    Mutant("strategies/learned/maths.py", "- kl_weight * (new - old)", "+ kl_weight * (new - old)", LEARNED),
    Mutant("strategies/learned/maths.py", "[rank - 1]]", "[rank - 2]]", LEARNED),
    Mutant("strategies/learned/maths.py", "placements += points >= reach", "placements += points > reach", LEARNED),
    Mutant("machines/composed.py", " + hops * PCIE_LATENCY_SECONDS,", ",", COMPOSED),
    Mutant("machines/composed.py", "to_card[source.name], to_card[target.name]", "to_card[source.name]", COMPOSED),
    Mutant("machines/composed.py", 'f"{target.host} receives")', 'f"{source.host} receives")', COMPOSED),
    Mutant("machines/composed.py", " or not int(digits):", ":", COMPOSED),
    Mutant("run/lower/rank_part.py", "if other and other[0] == copy:", "if other:", HOSTS),
    Mutant("run/lower/rank_part.py", "for device in ends):", "for device in ends[:1]):", HOSTS),
    Mutant("run/backends/hosts.py", "torch.set_rng_state(everyone[drawn][-1].clone())", "pass", HOSTS),
    Mutant(
        "run/backends/hosts.py",
        "return [rank for rank in others if before[rank] == now[rank]], late",
        "return [], late",
        HOSTS,
    ),
    Mutant("graph_capture/whole_passes.py", "if is_hooked(bool(dropout)) or not _has", "if not _has", ATTENTION),
    Mutant("graph_capture/whole_passes.py", "is_grad_enabled() or recorder.tape.is_back:", "is_grad_enabled():", ATTENTION),
    Mutant("graph_capture/whole_passes.py", "recorder.graph.colocated.append((maker, recorder.last_op))", "pass", ATTENTION),
    Mutant("graph_capture/whole_passes.py", "return 2 * 5 * query", "return 2 * 4 * query", ATTENTION),
    Mutant("simulate/disturbances.py", "* np.where(cpus, slowdown, 1.0)", "", DISTURBED),
    Mutant(
        "simulate/disturbances.py",
        "bytes_per_second=flat.bytes_per_second / links",
        "bytes_per_second=flat.bytes_per_second",
        DISTURBED,
    ),
    Mutant("simulate/disturbances.py", "(1 + off)[kind_of]", "1", DISTURBED),
    Mutant(
        "simulate/longest_step.py", "return float(slowest.sum() + ", "return float(slowest.max(initial=0.0) + ", SIMULATE
    ),
    Mutant("core/profile.py", "lambda check: check.distance", "lambda check: check.error", CHECKS),
    Mutant("core/optional_ops.py", "tensor_number[read_instead[graph.outputs]]", "tensor_number[graph.outputs]", OPTIONAL),
    Mutant("core/optional_ops.py", "while absent[read_instead].any():", "if absent[read_instead].any():", OPTIONAL),
    Mutant("core/cluster.py", "if not 0 <= limit <= has:", "if not 0 <= limit:", "tests/core/test_cluster.py"),
    Mutant("search/recovery.py", "if head.finding[0] == evaluations:", "if True:", DAMAGED),
    Mutant("search/recovery.py", 'for ending in ("", "-wal", "-shm"):', 'for ending in ("-wal", "-shm"):', DAMAGED),
    Mutant("training/planned_steps.py", "len(self._plans) >= self.max_plans", "len(self._plans) > self.max_plans", RAGGED),
    Mutant("training/planned_steps.py", "known.remove(step)\n", "pass\n", RAGGED),
    Mutant("core/problem.py", "ops + copies + launches, max", "ops + copies, max", "tests/core/test_problem.py"),
    Mutant("rewrite/augmented_graph.py", "after += self.readers.get(self.storage[t], ())", "pass", OPTIONS),
    Mutant("rewrite/augmented_graph.py", "self.top |= made", "pass", OPTIONS),
    Mutant("rewrite/augmented_graph.py", "last = max(n for n in self._users", "last = min(n for n in self._users", OPTIONS),
    Mutant("rewrite/augmented_graph.py", "np.where(waits, 0.0, o.bytes_moved[origins])", "o.bytes_moved[origins]", OPTIONS),
    Mutant("rewrite/augmented_graph.py", "-1, int(o.flops[n])", "-1, nbytes[kept]", f"{OPTIONS} {PROGRAM}"),
    Mutant("rewrite/optional_tensors.py", "and self.last_early_use(storage) < late[0]", "", f"{OPTIONS} {PROGRAM}"),
    Mutant(
        "rewrite/optional_tensors.py",
        "if any(facts.is_changed(t, place) for t in inputs):",
        "if False:",
        f"{OPTIONS} {PROGRAM}",
    ),
    Mutant(
        "rewrite/optional_tensors.py",
        "if any(units.ops[maker][-1] >= ops[-1] for maker in makers.values()):",
        "if False:",
        f"{OPTIONS} {PROGRAM}",
    ),
    Mutant(
        "rewrite/optional_tensors.py", "n != draw and RANDOM.search(", "False and RANDOM.search(", f"{OPTIONS} {PROGRAM}"
    ),
    Mutant("rewrite/optional_tensors.py", " or storage in self.kept:", ":", f"{OPTIONS} {PROGRAM}"),
    Mutant("rewrite/optional_tensors.py", "key=lambda entry: entry[1])[1:]:", "key=lambda entry: entry[1]):", OPTIONS),
    Mutant("rewrite/optional_tensors.py", "return max((n for n in made if", "return min((n for n in made if", OPTIONS),
    Mutant(
        "rewrite/augmented_program.py",
        "while (root := program.roots.get(slot))",
        "if (root := program.roots.get(slot))",
        PROGRAM,
    ),
    Mutant("rewrite/augmented_program.py", '{"dtype": torch.bool}', "{}", PROGRAM),
    Mutant("rewrite/augmented_program.py", "lean.add(args[-1])", "pass", PROGRAM),
    Mutant("rewrite/fuse.py", " or not self._keeps_host_values(ops, position):", ":", FUSE),
    Mutant("rewrite/fuse.py", "self.position[first] = position", "pass", FUSE),
    Mutant("rewrite/fuse.py", "return storage in self.kept_storages or any(", "return any(", FUSE),
    Mutant("rewrite/fuse.py", "gate = gate._replace(first_op=len(before))", "pass", FUSE),
    Mutant("rewrite/memory_options.py", "if len(set(names)) < len(names) or len(", "if len(", PLANS),
    Mutant("rewrite/memory_options.py", "if name in MEMORY_OPTIONS]) > 1:", "if name in MEMORY_OPTIONS]) > 2:", PLANS),
    Mutant("search/tight_memory.py", " or not memory_is_tight(problem):", ":", "tests/cli/test_memory_command.py"),
    Mutant(
        "run/lower/neighbours.py",
        "return new if _Memory(new, resolved).is_within(before) else given",
        "return new",
        NEIGHBOURS,
    ),
    Mutant(
        "run/lower/neighbours.py",
        "if not self.is_update[op] or op in self.exchanging:",
        "if not self.is_update[op]:",
        NEIGHBOURS,
    ),
    Mutant("run/lower/neighbours.py", "for tensor in row[3]):", "for tensor in row[3] - row[3]):", NEIGHBOURS),
    Mutant("run/lower/neighbours.py", "if number in waits.awaited:", "if False:", NEIGHBOURS),
    Mutant("run/lower/neighbours.py", "== self.groups[op] for need in needs)", "!= -1 for need in needs)", NEIGHBOURS),
    Mutant("simulate/choices.py", "start = max(start, ends[other])", "pass", CHOICES),
    Mutant("simulate/choices.py", "if sender != host:", "if False:", CHOICES),
    Mutant("simulate/choices.py", "last_use[storage[t]] = -1\n", "pass\n", CHOICES),
    Mutant("simulate/choices.py", "given[position * num_devices + d] = 0", "pass", CHOICES),
    Mutant("run/backends/hosts.py", "if theirs.get(name) != value:", "if False:", HOSTS),
    Mutant("run/backends/rank_messages.py", "if nbytes != self._nbytes or any(", "if any(", HOSTS),
    Mutant("run/backends/hosts.py", "if self._failure:", "if False:", HOSTS),
    Mutant("run/backends/hosts.py", "if not rank < size:", "if False:", HOSTS),
    Mutant("core/graph.py", "if (together := float(", "if 0 * (together := float(", "tests/core/test_graph.py"),
    Mutant(
        "simulate/simulator.py", "np.iinfo(np.int64).max // max(len(memory_bytes), 1)", "np.iinfo(np.int64).max", SIMULATE
    ),
    Mutant("search/store.py", "self._check_version()  # another", "pass  # another", STORE),
    Mutant("search/store.py", "is_unused = is_empty", "is_unused = True", STORE),
    Mutant(
        "search/store.py",
        "answer if answer.fastest is not None else answer._replace(fastest=best)",
        "answer._replace(fastest=best)",
        "tests/search/test_simplicity.py",
    ),
    Mutant(
        "strategies/learned/graph_policy/placing.py", "if best < 0 or score > best_score:", "if score > best_score:", POLICY
    ),
    Mutant("experiments/policy/teaching_record.py", "elif found != TABLES:", "elif False:", TEACHING),
    Mutant("experiments/policy/teaching.py", "one.graph.problem.check_placements(state", "print(state", TEACHING),
    Mutant("formats/safetensors_file.py", " or offsets[1] > len(body):", ":", "tests/formats/test_safetensors_file.py"),
    Mutant("formats/files.py", "if len(unpacked) > limit:", "if False:", "tests/formats"),
    Mutant("formats/files.py", "        check_regular(path, os.stat(path), error)\n", "", "tests/formats tests/cli"),
    Mutant("simulate/kernels.py", "if host_waits[link] and maker >= 0:", "if False:", SIMULATE),
    Mutant("simulate/timeline.py", "if flat.host_waits[link] and maker >= 0 and ", "if False and ", SIMULATE),
    Mutant("simulate/choices.py", "if flat.host_waits[link] and producer[t] >= 0:", "if False:", CHOICES),
    Mutant("simulate/longest_step.py", "cluster.copy_launch_seconds * launches_per_copy", "launches_per_copy * 0", SIMULATE),
    Mutant("rewrite/recomputing.py", "and all(self.is_lasting[tensor] for tensor in c.reads[op])", "", FUSE),
    Mutant("rewrite/recomputing.py", "and is_cheap(c.values.op_calls[op])", "", FUSE),
    Mutant("rewrite/recomputing.py", "if self.storage[tensor] in kept_storages}", "if False}", FUSE),
    Mutant("rewrite/recomputing.py", "steps.kept |= left_over", "return repeated", FUSE),
    Mutant("rewrite/channels_last.py", " and storage not in self.kept and", " and", FUSE),
    Mutant("rewrite/channels_last.py", " or len(values.program.calls) >= MOST_CALLS * len(weights):", ":", FUSE),
    Mutant("rewrite/channels_last.py", "self.failed.add(self.values.storages[source])", "pass", FUSE),
    Mutant("graph_capture/recurrent_layers.py", "return 2 * self.forward.flops(", "return self.forward.flops(", RECURRENT),
    Mutant("graph_capture/recurrent_layers.py", "    if draws:\n", "    if False:\n", RECURRENT),
    Mutant("run/codegen/direct_functions.py", ' and call.kwargs.get("device") is HERE and', " and", DIRECT),
    Mutant("strategies/options/streamed.py", "overflow_bytes and not is_slower:", "overflow_bytes:", STREAMED),
    Mutant("strategies/options/streamed.py", "if is_update[n] else n)", "if False else n)", STREAMED),
    Mutant("strategies/options/streamed.py", "worth = (len(passes) - 1) * there / size", "worth = 0.0", STREAMED),
    Mutant("run/step/failed_steps.py", "if resident.name not in updated:", "if True:", FAILED),
    Mutant("run/step/failed_steps.py", " if old != new or is_replayed]", " if old != new]", FAILED),
    Mutant("machines/slices.py", "cluster.link(source, target).host_waits,", "False,", "tests/machines/test_slices.py"),
    Mutant("search/run_rows.py", 'given.get("fastest_order", None) is None', "True", "tests/search/test_simplicity.py"),
    Mutant("formats/link_fields.py", "if link.host_waits else {}", "if False else {}", "tests/formats/test_cluster_file.py"),
)


def applied(mutant: Mutant, root: Path) -> str:
    """Returns the file with the bug; a ValueError if the line is not there exactly once."""
    text = (root / "src/placewise" / mutant.file).read_text("utf-8")
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file}: {mutant.old!r} is there {count} times: write the mutant anew")
    return text.replace(mutant.old, mutant.new)


def survives(mutant: Mutant, copy: Path, most_seconds: float = MOST_SECONDS) -> bool:
    """Plants a bug in a copy of the tree and returns whether its tests still pass, in at most so many seconds.

    The copy is as before afterwards.
    """
    path = copy / "src/placewise" / mutant.file
    whole = path.read_bytes()
    path.write_text(applied(mutant, copy), "utf-8")
    # Kernels that others call are cached with their callers' files, so a bug in one needs a cache of its own.
    cache = tempfile.mkdtemp(dir=copy) if "simulate.compile import" in whole.decode() else str(copy / "kernels")
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "NUMBA_CACHE_DIR": cache}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
    try:
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=most_seconds, check=False)
        if ended.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout.decode()[-500:]}")
        return ended.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_bytes(whole)


def main() -> int:
    """Runs the mutants; returns 1 if one survives or no longer applies."""
    parser = argparse.ArgumentParser(description="Plants small bugs in a copy of the tree and runs the tests.")
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only mutants with this word in their file's name or their line"
    )
    parser.add_argument("--part", metavar="K/N", default="1/1", help="only one of so many parts, as in 2/5")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.file or options.only in mutant.old][part - 1 :: parts]
    failed = []
    with tempfile.TemporaryDirectory(prefix="placewise-mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "site", "demo", "*.nb[ic]"))
        whole_seconds: dict[str, float] = {}  # of the tests without a bug; inf: they fail
        for mutant in chosen:
            try:
                if mutant.tests not in whole_seconds:
                    began = time.monotonic()
                    passes = survives(Mutant("__init__.py", *["__all__ = ["] * 2, mutant.tests), copy)
                    whole_seconds[mutant.tests] = time.monotonic() - began if passes else math.inf
                if whole_seconds[mutant.tests] == math.inf:
                    raise RuntimeError("its tests fail without a planted bug, so they prove nothing")
                most_seconds = min(MOST_SECONDS, HANG_SECONDS + HANG_TIMES * whole_seconds[mutant.tests])
                said = "SURVIVES" if survives(mutant, copy, most_seconds) else "caught"
            except (ValueError, RuntimeError) as problem:
                said = f"FAILED {problem}"
            failed += [mutant] if said != "caught" else []
            print(f"{said:9} {mutant.file}: {mutant.old.strip()} -> {mutant.new.strip()}", flush=True)
    print(f"{len(chosen)} mutants, {len(chosen) - len(failed)} caught")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
