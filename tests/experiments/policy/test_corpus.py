"""The corpus of the graph policy: the same for a seed, without held-out families, and steps that are valid."""

import numpy as np
import pytest

from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.experiments.policy.corpus import FAMILIES, Lesson, changed, draw_lessons, random_step, with_little_memory
from placewise.simulate.simulator import Simulator


def test_lessons_are_those_of_their_seed_and_held_out_families_leave_the_others_as_they_are() -> None:
    lessons = draw_lessons(80, 0)
    assert len(lessons) == 80
    assert {lesson.family for lesson in lessons} == set(FAMILIES)
    assert lessons == draw_lessons(80, 0)
    assert lessons != draw_lessons(80, 1)
    assert lessons[:40] == draw_lessons(40, 0)
    held_out = draw_lessons(80, 0, ("nmt", "gpt"))
    assert held_out == [lesson for lesson in lessons if lesson.family not in ("nmt", "gpt")]
    assert not any(lesson.model.startswith(("nmt", "gpt")) for lesson in held_out)
    assert len({lesson.key for lesson in lessons}) == 80


def test_a_family_without_another_model_is_passed_over() -> None:
    """inception has 30 models, and 2,000 lessons are of 400 models of eight families."""
    lessons = draw_lessons(2000, 0)
    assert len(lessons) == 2000
    models = {family: {lesson.model for lesson in lessons if lesson.family == family} for family in FAMILIES}
    assert len(models["inception"]) == 30
    assert len(models["nmt"]) > 50
    assert lessons[:80] == draw_lessons(80, 0)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps_are_steps(seed: int) -> None:
    graph = random_step(seed)
    assert graph.digest == random_step(seed).digest
    problem = Problem.of(graph, Cluster.load("2xK80"))
    evaluation = Simulator(problem)(np.zeros((1, problem.num_groups), np.int64))
    assert 0 < evaluation.step_seconds[0] < np.inf
    phases = graph.ops.phases.tolist()
    assert phases == sorted(phases)
    assert phases.count(0) == phases.count(1)
    written = set(graph.ops.writes.values.tolist())
    assert len(written) == len(graph.ops.writes.values)


def test_changed_machines_keep_what_is_alike() -> None:
    cluster = Cluster.load("4xK80")
    other = changed(cluster, np.random.default_rng(1))
    assert other.device_names == cluster.device_names
    assert len({device.flops for device in other.devices if device.kind == "gpu"}) == 1
    assert other.digest != cluster.digest
    assert other.digest == changed(cluster, np.random.default_rng(1)).digest


def test_little_memory_is_less_than_one_device_needs() -> None:
    graph, cluster = random_step(3), Cluster.load("4xK80")
    tight = with_little_memory(graph, cluster, np.random.default_rng(0))
    problem = Problem.of(graph, tight)
    assert Simulator(problem)(np.zeros((1, problem.num_groups), np.int64)).overflow_bytes[0] > 0


def test_a_lesson_is_the_same_problem_again() -> None:
    lesson = Lesson("random", "random-step:5", "3090+1080ti", 77, 64)
    assert lesson.problem().digest == lesson.problem().digest
    assert lesson.key == "random-step:5 on 3090+1080ti, seed 77, 64 blocks"
