"""A fork begins with everything that the run had at a checkpoint, and with nothing of what came later."""

from __future__ import annotations

import pytest
import yaml
from run_helpers import make_run

from launcher.errors import BadInput, Unsure
from launcher.job.forked_run import PlannedFork, checkpoint_of, fill, forked, plan_fork, refuse_misfits
from launcher.job.kept_files import keep_files
from launcher.recipe.changes import Change
from launcher.recipe.load import load_recipe
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.manifest import Manifest, write_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, read, read_lines, write
from megatron_rl.contract.run_records import CodeSnapshot, Fork
from megatron_rl.recipe.own_code import kept


def trained(root) -> RunDir:
    """Six steps, checkpoints of 3 and 6, a snapshot of the code."""
    run = make_run(root)
    for step in (3, 6):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "weights").write_text(f"step {step}")
    run.latest_checkpoint.write_text("step-000006\n")
    for step in range(1, 7):
        append(run.metrics, MetricsLine(step, {}))
    append(run.evaluations, MetricsLine(0, {}))
    append(run.evaluations, MetricsLine(5, {}))
    (run.root / "code-002").mkdir()
    (run.root / "code-002" / "train.py").write_text("code")
    run.code.symlink_to("code-002")
    return run


def test_the_fork_has_the_run_up_to_the_checkpoint(tmp_path):
    source, target = trained(tmp_path / "a"), RunDir(tmp_path / "b")
    target.root.mkdir()
    fill(PlannedFork(source, 3, load_recipe("demo"), (Change("grpo.kl_beta", 0.0, 0.1),)), target)
    assert target.checkpoint_steps() == [3]
    assert target.latest_checkpoint.read_text() == "step-000003\n"
    assert [line.step for line in read_lines(MetricsLine, target.metrics).records] == [1, 2, 3]
    assert [line.step for line in read_lines(MetricsLine, target.evaluations).records] == [0]
    assert (target.code / "train.py").read_text() == "code"
    record = read(Fork, target.fork)
    assert (record.source, record.step, record.changes) == (str(source.root), 3, {"grpo.kl_beta": [0.0, 0.1]})


def test_the_fork_takes_over_the_runs_copies_of_code_that_is_gone_meanwhile(tmp_path):
    loss = tmp_path / "mine.py"
    loss.write_text("def loss(tokens, config): ...\n")
    recipe = load_recipe("demo", [f"grpo.policy_loss={loss}:loss"])
    source = trained(tmp_path / "a")
    keep_files(source, recipe, renew=True)
    loss.unlink()
    with forked(PlannedFork(source, 3, recipe, ()), tmp_path / "b") as target:
        assert kept(recipe.config.grpo.policy_loss, target).startswith(str(target.kept_files))
        (copy,) = target.kept_files.glob("*/mine.py")
        assert copy.read_text() == "def loss(tokens, config): ...\n"


def test_a_fork_that_keeps_older_code_has_the_keys_which_that_knows(tmp_path):
    source = trained(tmp_path / "a")
    write(source.code_record, CodeSnapshot(2, 0.0, [], ["."]))
    values = yaml.safe_load(source.resolved.read_text())
    del values["model"]["norms"]
    source.resolved.write_text(yaml.safe_dump(values | {"model": values["model"] | {"norms_around": False}}))
    fork = PlannedFork(source, 3, load_recipe("demo", ["grpo.kl_beta=0.1"]), ())
    for keeps_code, key in ((True, "norms_around"), (False, "norms")):
        with forked(fork, tmp_path / key, keeps_code) as target:
            recorded = yaml.safe_load(target.resolved.read_text())
            assert {name for name in recorded["model"] if name.startswith("norms")} == {key}
            assert recorded["grpo"]["kl_beta"] == 0.1


def test_weights_take_no_space_and_outlive_their_run(tmp_path):
    source, target = trained(tmp_path / "a"), RunDir(tmp_path / "b")
    target.root.mkdir()
    fill(PlannedFork(source, 3, load_recipe("demo"), ()), target)
    ours, theirs = (run.checkpoint(3) / "weights" for run in (target, source))
    assert ours.stat().st_ino == theirs.stat().st_ino
    theirs.unlink()  # as save.keep does
    assert ours.read_text() == "step 3"


@pytest.mark.parametrize(("recorded", "steps"), [(False, [6, 3]), (True, [6])])
def test_a_fork_has_the_weights_of_an_evaluation_that_it_repeats(recorded, steps, tmp_path):
    source, target = trained(tmp_path / "a"), RunDir(tmp_path / "b")
    write_manifest(source.checkpoint(6), Manifest(6, "a", 1, 3, 0.0, 0.0, {"evaluating": 3}, {}))
    if recorded:
        append(source.evaluations, MetricsLine(3, {}))
    target.root.mkdir()
    fill(PlannedFork(source, 6, load_recipe("demo"), ()), target)
    assert target.checkpoint_steps() == steps
    assert target.latest_checkpoint.read_text() == "step-000006\n"


def test_the_newest_checkpoint_or_the_one_asked_for(tmp_path):
    run = trained(tmp_path / "a")
    assert checkpoint_of(run, None) == 6
    assert checkpoint_of(run, 3) == 3
    with pytest.raises(BadInput, match=r"no checkpoint of step 4; there are 3, 6"):
        checkpoint_of(run, 4)
    with pytest.raises(BadInput, match="has no checkpoint yet"):
        checkpoint_of(make_run(tmp_path / "new"), None)


def test_a_run_with_an_at_in_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = trained(tmp_path / "me@home")
    assert (plan_fork(str(run.root), (), False).source.root, plan_fork(f"{run.root}@3", (), False).step) == (
        run.root,
        3,
    )


@pytest.mark.parametrize("step", ["", "x", "-1", "²", "9" * 5000])
def test_a_step_that_is_no_number(step):
    with pytest.raises(BadInput, match=r"expected RUN@STEP with the number of a step, such as run@400"):
        plan_fork(f"run@{step}", [], trusted=False)


def test_what_the_weights_fix_cannot_change():
    refuse_misfits([Change("training.seed", 0, 1), Change("grpo.group_size", 16, 8)], step=3, steps=10)
    with pytest.raises(BadInput, match=r"model\.num_layers: 2 -> 3"):
        refuse_misfits([Change("model.num_layers", 2, 3)], step=3, steps=10)
    with pytest.raises(BadInput, match="the checkpoint is at step 3 already"):
        refuse_misfits([], step=3, steps=3)


def test_a_fork_that_cannot_start_leaves_nothing(tmp_path):
    source = trained(tmp_path / "a")
    mine = tmp_path / "mine"
    mine.mkdir()
    fork = plan_fork(f"{source.root}@3", ["grpo.kl_beta=0.1"], False)
    for given in (mine, None):
        with pytest.raises(BadInput, match="no such partition"), forked(fork, given) as run:
            assert run.checkpoint_steps() == [3]
            raise BadInput("no such partition")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mine"]
    assert list(mine.iterdir()) == []


def test_a_fork_stays_where_a_job_may_need_it(tmp_path):
    fork = plan_fork(f"{trained(tmp_path / 'a').root}@3", [], False)
    with pytest.raises(Unsure), forked(fork, tmp_path / "b") as run:
        raise Unsure("sbatch did not answer")
    assert run.checkpoint_steps() == [3]


def test_a_checkpoint_that_is_pruned_meanwhile_is_bad_input_and_leaves_nothing(tmp_path, monkeypatch):
    source = trained(tmp_path / "a")
    fork = plan_fork(f"{source.root}@3", [], False)
    (source.checkpoint(3) / "weights").unlink()
    source.checkpoint(3).rmdir()
    with pytest.raises(BadInput, match="may have been removed meanwhile"), forked(fork, tmp_path / "b"):
        pass
    assert not (tmp_path / "b").exists()
