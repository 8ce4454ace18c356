"""Cluster profiles: choice, expansion of variables, and errors that say where and what to do."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from launcher.cluster.choice import LOCAL, SHIPPED, Clusters, load_clusters
from launcher.errors import BadInput
from megatron_rl.rank.addresses import is_named

MINIMAL = "{partition: gpu, gpus_per_node: 8, container: null, run_root: /data/mrl}"
LAB = "lab:\n  gpus_per_node: 8\n  run_root: /x\n"
HOME = {"HOME": "/home/me", "USER": "me"}


@pytest.fixture
def write(tmp_path: Path):
    """Load profiles from the text of clusters.yaml."""

    def write(text: str, environ: dict[str, str] = HOME) -> Clusters:
        file = tmp_path / "clusters.yaml"
        file.write_text(text, encoding="utf-8")
        return load_clusters(file, environ)

    return write


def problems(function, *arguments) -> list[str]:
    with pytest.raises(BadInput) as caught:
        function(*arguments)
    return list(caught.value.problems)


def test_without_a_file_there_are_the_shipped_profiles_and_this_machine(tmp_path):
    clusters = load_clusters(environ={"HOME": str(tmp_path)})
    assert clusters.names() == ["h100", "plain", LOCAL]
    assert clusters.choose_profile(None, None) == (LOCAL, None)
    assert clusters.file == str(tmp_path / ".config/mrl/clusters.yaml")


def test_the_shipped_profiles_are_complete():
    clusters = load_clusters(environ={"HOME": "/home/me"})
    h100, plain = clusters.profile("h100"), clusters.profile("plain")
    assert (h100.gpus_per_node, h100.gpu_memory_gib, h100.run_root) == (8, 80, "/home/me/mrl")
    assert h100.container is not None
    assert h100.container.named
    assert h100.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert h100.environment["UB_TIMEOUT"] == "720"
    assert h100.time_limit == "4:00:00"
    assert plain.container is None


def test_a_minimal_profile_is_enough(write):
    for text in (f"clusters:\n  lab: {MINIMAL}\n", f"lab: {MINIMAL}\n"):
        profile = write(text).profile("lab")
        assert (profile.partition, profile.gpus_per_node, profile.container) == ("gpu", 8, None)
    assert write("lab: {gpus_per_node: 8, run_root: /x, time_limit: 90}").profile("lab").time_limit == "90"


def test_commented_examples_of_a_shipped_profile_are_valid(write):
    text = (SHIPPED / "h100.yaml").read_text(encoding="utf-8")
    taken_up, examples = re.subn(r"^  # ([A-Z_]+: )", r"  \1", text, flags=re.MULTILINE)
    profile = write("taken_up:\n" + textwrap.indent(taken_up, "  ")).profile("taken_up")
    assert examples == 4
    assert profile.environment["NCCL_IB_HCA"].startswith("=mlx5_0,")
    assert is_named("eth0", profile.environment["NCCL_SOCKET_IFNAME"])


def test_the_file_is_found_where_the_environment_says(tmp_path):
    (tmp_path / "mrl").mkdir()
    (tmp_path / "mrl" / "clusters.yaml").write_text(f"lab: {MINIMAL}")
    (tmp_path / "other.yaml").write_text(f"other: {MINIMAL}")
    assert "lab" in load_clusters(environ={"XDG_CONFIG_HOME": str(tmp_path)}).names()
    assert "other" in load_clusters(environ={"MRL_CLUSTERS": str(tmp_path / "other.yaml")}).names()


def test_the_file_of_mrl_clusters_must_exist(tmp_path):
    missing = str(tmp_path / "none.yaml")
    assert problems(load_clusters, None, {"MRL_CLUSTERS": missing}) == [
        f"{missing}: cannot be read: No such file or directory"
    ]


def test_a_file_that_all_users_can_write_is_refused(write, tmp_path):
    write(LAB)
    (tmp_path / "clusters.yaml").chmod(0o666)
    assert "all users can write it, and its commands and images run as you" in problems(write, LAB)[0]


def test_the_cluster_is_chosen_by_command_line_then_environment_then_recipe_then_default(write):
    text = f"default: two\nclusters:\n  one: {MINIMAL}\n  two: {MINIMAL}\n"
    many = write(text)
    assert write(text, {**HOME, "MRL_CLUSTER": "two"}).choose("one", "local") == "one"
    assert write(text, {**HOME, "MRL_CLUSTER": "one"}).choose(None, "local") == "one"
    assert many.choose(None, "local") == LOCAL  # the demo stays here
    assert write(text, {**HOME, "MRL_CLUSTER": ""}).choose(None, "h100") == "h100"
    assert many.choose(None, None) == "two"
    assert write(f"only: {MINIMAL}").choose(None, None) == "only"
    assert write(f"one: {MINIMAL}\ntwo: {MINIMAL}").choose(None, None) == LOCAL


def test_an_own_profile_hides_a_shipped_one_of_its_name(write):
    assert write(f"h100: {MINIMAL}").profile("h100").partition == "gpu"


def test_an_unknown_cluster_is_refused_with_the_names_and_the_file(write, tmp_path):
    yours = f"h100, lab, plain, local (yours: {tmp_path / 'clusters.yaml'})"
    assert problems(write(f"lab: {MINIMAL}").choose, "lap", None) == [
        f"--cluster: no cluster is called 'lap'; did you mean lab? There are {yours}"
    ]
    assert problems(write(f"lab: {MINIMAL}", {**HOME, "MRL_CLUSTER": "xyzzy"}).choose, None, None) == [
        f"MRL_CLUSTER: no cluster is called 'xyzzy'; there are {yours}"
    ]


def test_an_unknown_default_is_refused_with_its_line(write, tmp_path):
    assert problems(write, f"lab: {MINIMAL}\ndefault: lib\n")[0].startswith(
        f"{tmp_path / 'clusters.yaml'}:2: default: no cluster is called 'lib'; did you mean lab?"
    )


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("lab:\n  partitoin: gpu\n  gpus_per_node: 8\n  run_root: /x", 2, "partitoin: unknown key (did you mean part"),
        ("clusters:\n  lab:\n    gpus_per_node: 8", 2, "clusters.lab.run_root: missing; expected text"),
        ("lab:\n  gpus_per_node: 0\n  run_root: /x", 2, "lab.gpus_per_node: expected an integer > 0, got 0"),
        (f"{LAB}  container: {{image: i, mount: []}}", 4, "mount: unknown key (did you mean mou"),
        (f"{LAB}  environment:\n    N: 1", 5, "expected text, got 1 (put it in q"),
        (f"{LAB}  environment:\n    a-b: ''", 4, "'a-b' is not the name of an envi"),
        (f"{LAB}  environment:\n    HF_TOKEN: s3cr3t", 5, "list HF_TOKEN under se"),
        (f'{LAB}  prolog: ["a\\r"]', 4, "prolog: contains a carriage return"),
        (f'{LAB}  environment: {{A: "b\\r"}}', 4, "environment: contains a carriage return"),
        (f"{LAB}  secrets: [A B]", 4, "expected the name of an environment variab"),
        (f"{LAB}  sbatch: [foo]", 4, "'foo' is not a flag of sbatch"),
        (f"{LAB}  sbatch: [--array=0-3]", 4, "a run is one job, not an array"),
        (f'{LAB}  qos: "a\\nb"', 4, "qos: expected one line of text or null"),
        (f"{LAB}  container: {{image: i, mounts: [/a]}}", 4, "'/a' is not SRC:DST"),
        ("local:\n  gpus_per_node: 8\n  run_root: /x", 1, "local: always means this machine"),
        (f"clusters: {{lab: {MINIMAL}}}\ndefalt: lab", 2, "defalt: unknown key beside clusters:"),
        ("clusters: [lab]", 1, "clusters: expected a mapping of names to profiles"),
        ("default: 3", 1, "default: expected the name of a cluster, got 3"),
        ("lab: {gpus_per_node: 8\n", 2, "not valid YAML"),
        (
            "lab: {gpus_per_node: 8, run_root: /x, gpu_hour_price: 2}",
            1,
            "was removed: `mrl report` shows the GPU-hours",
        ),
    ],
)
def test_invalid_profiles_are_refused_with_their_line(write, tmp_path, text, line, complaint):
    (problem,) = problems(write, text)
    assert problem.startswith(f"{tmp_path / 'clusters.yaml'}:{line}: ")
    assert complaint in problem
    assert "s3cr3t" not in problem


@pytest.mark.parametrize("name", ["PGPASSWORD", "DB_PASS", "MYSQL_PWD", "MY_KEY", "AWS_SECRET_ACCESS_KEY", "apikey"])
@pytest.mark.parametrize("value", ["s3cr3t", "123"])
def test_a_secret_in_the_environment_is_refused_by_name_and_never_shown(write, name, value):
    text = f"lab:\n  gpus_per_node: 8\n  run_root: /x\n  environment:\n    {name}: {value}"
    (problem,) = problems(write, text)
    assert f"environment.{name}: is the name of a secret" in problem
    assert value not in problem
    url = text.replace(f"{name}: {value}", f"HTTPS_PROXY: http://me:{value}@proxy:3128")
    (problem,) = problems(write, url)
    assert "environment.HTTPS_PROXY: contains a password in a URL" in problem and value not in problem


def test_names_that_only_look_like_secrets_are_accepted(write):
    values = {
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "9",
        "NCCL_BYPASS": "1",
        "HTTP_PROXY": "http://proxy:3128/a@b",
        "GIT": "ssh://git@host/x",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
    }
    lines = "".join(f"\n    {name}: '{value}'" for name, value in values.items())
    text = f"lab:\n  gpus_per_node: 8\n  run_root: /x\n  environment:{lines}"
    assert write(text).profile("lab").environment == values


def test_all_problems_of_a_file_are_listed_at_once(write):
    assert len(problems(write, "lab: {gpus_per_node: 0}\nlib: {gpus: 8, gpus_per_node: 8, run_root: /x}")) == 3


def test_home_and_variables_are_expanded_in_paths(write):
    clusters = write(
        "lab:\n  gpus_per_node: 8\n  run_root: ~/$USER/${USER}x/mrl\n"
        "  container: {image: ~/i.sqsh, mounts: ['~/data:/data:ro', '/scratch/$USER:/scratch']}\n"
    )
    profile = clusters.profile("lab")
    assert profile.run_root == "/home/me/me/mex/mrl"
    assert profile.container is not None
    assert profile.container.image == "/home/me/i.sqsh"
    assert profile.container.mounts == ["/home/me/data:/data:ro", "/scratch/me:/scratch"]


def test_the_dollar_of_a_registry_login_is_literal(write):
    image = "$oauthtoken@nvcr.io#nvidia/pytorch:25.06-py3"
    clusters = write(f"lab: {{gpus_per_node: 8, run_root: /x, container: {{image: '{image}'}}}}")
    container = clusters.profile("lab").container
    assert container is not None
    assert container.image == image


def test_every_other_value_is_literal(write):
    values = "$(rm -rf ~) $USER 'one' \"two\"\nnext line"
    clusters = write(
        "lab:\n  gpus_per_node: 8\n  run_root: /data/$(whoami)/it's\n  environment:\n"
        '    V: "$(rm -rf ~) $USER \'one\' \\"two\\"\\nnext line"\n'
    )
    profile = clusters.profile("lab")
    assert profile.environment == {"V": values}
    assert profile.run_root == "/data/$(whoami)/it's"


def test_an_unset_variable_is_one_error(write, tmp_path):
    clusters = write("lab:\n  gpus_per_node: 8\n  run_root: /scratch/$PROJECT/mrl\n")
    assert problems(clusters.profile, "lab") == [
        f"{tmp_path / 'clusters.yaml'}:3: run_root: /scratch/$PROJECT/mrl: "
        "the variable PROJECT is not set in your shell"
    ]


@pytest.mark.parametrize("root", ["runs", "./runs", '"/a\\nb"'])
def test_the_run_root_is_an_absolute_path_on_one_line(write, root):
    clusters = write(f"lab:\n  gpus_per_node: 8\n  run_root: {root}\n")
    assert "run_root: expected an absolute path on one line" in problems(clusters.profile, "lab")[0]


def test_a_mount_with_white_space_is_refused(write):
    clusters = write(
        "lab:\n  gpus_per_node: 8\n  run_root: /x\n  container:\n    image: a:b\n    mounts: ['/my data:/d']\n"
    )
    with pytest.raises(BadInput, match=r"clusters.yaml:6: container.mounts: .*'/my data:/d'"):
        clusters.profile("lab")


@pytest.mark.parametrize("gres", ["gpu:8", "gres/gpu:", "gres/nic", "--gres=gpu", ""])
def test_gres_of_anything_but_gpus_is_refused(write, gres):
    with pytest.raises(BadInput, match="gres"):
        write(f"lab: {{gpus_per_node: 8, run_root: /x, gres: {gres!r}}}").profile("lab")
