"""Every sample of the docs is generated or tested.

Commands have their options, files are read, queries name what exists, outputs are printed so.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import typer
import yaml
from msgspec.structs import replace as with_fields
from typer.main import get_command
from typer.testing import CliRunner

import gpuwatch
from gpuwatch import api
from gpuwatch.alerting.render import groups
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.cli import build
from gpuwatch.config import parse_config
from gpuwatch.diagnosis.finding import Verdict
from gpuwatch.diagnosis.rates import Done
from gpuwatch.diagnosis.report import make_report
from gpuwatch.diagnosis.rules.progress import stalled
from gpuwatch.diagnosis.window import MeanStep, RankFacts
from gpuwatch.hook.torch import memory
from gpuwatch.metrics import BY_NAME
from gpuwatch.tools.reports.ledgers import digest_text
from gpuwatch.tools.stacks.records import HotLine, ProcessStacks, Stacks, lines
from gpuwatch.wire import Collective, Standstill
from gpuwatch_agent.gpus.allocations import AllocationFile
from tests.programs import ROOT
from tests.unit.rules.windows import HEALTHY, steps
from tests.unit.tuning.machines import Machine

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GIB = 1 << 30


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0][:40]}"


BLOCKS = [
    Block(str(path.relative_to(ROOT)), language, text)
    for path in PAGES
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
]


def in_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


# Outputs --------------------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "README.md: gpuwatch · train.py · 8.0 s": "unit/docs/test_readme.py",
    "docs/start/quickstart.md: gpuwatch · train.py": "integration/docs/test_quickstart.py",
    "docs/guides/top.md: run ": "unit/top/test_pages.py",
    "docs/concepts/jobs.md: gpuwatch · job llm-7": "unit/runs/test_jobs.py",
    "docs/concepts/jobs.md: gpuwatch · job 4711": "integration/runs/test_agent_jobs.py",
    "docs/deploy/systemd.md: $ systemd-analyze security": "integration/deploy/test_systemd.py",
}
"""Outputs that another test compares with what is printed."""
DRAWINGS = ("docs/concepts/architecture.md: training process", "docs/concepts/jobs.md: attempt 1")


def training(name: str, workers: int = 0, rank: int = 0, *hot: HotLine) -> ProcessStacks:
    return ProcessStacks(rank, 1, name, workers, 50, hot, 0.0)


def sampled_stacks(monkeypatch: pytest.MonkeyPatch) -> str:
    decode = [
        HotLine("/home/dataset.py", 88, "Photos.decode", own, whole) for own, whole in ((0.71, 0.83), (0.69, 0.85))
    ]
    found = Stacks(
        0.0, 5.0, 50,
        (
            training("training", 0, 0, HotLine("/home/train.py", 31, "main", 0.92, 0.92)),
            *(training("worker", number, 0, line) for number, line in enumerate(decode)),
        ),
        ("gpuwatch-stacks-resnet50-a-rank0.speedscope.json",),
    )  # fmt: skip
    monkeypatch.setattr(sys.modules["gpuwatch.commands.stacks"], "take", lambda *_: found)
    return CliRunner().invoke(build(typer), ["stacks", "--pid", "1"]).stdout


def hanging_ranks(_: pytest.MonkeyPatch) -> str:
    places = ((4, "wait_for_peer"), (6, "write_checkpoint"), (4, "wait_for_peer"))
    found = (
        training("training", 0, rank, HotLine("hang.py", line, function, 1.0, 1.0))
        for rank, (line, function) in enumerate(places)
    )
    return "\n".join(lines(Stacks(0.0, 5.0, 50, tuple(found), ())))


def breakdown(_: pytest.MonkeyPatch) -> str:
    window = with_fields(HEALTHY, duration_s=60.0, states_s={"compute": 59.64, "input_wait": 0.36})
    sections = {"forward": 3.0, "backward": 5.0, "optimizer": 2.0}
    text = str(make_report(window, Done(60.0, 600, None), run="r", name="train.py", breakdown=sections))
    return "\n".join(text.splitlines()[2:4])


def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> str:
    torch: Any = ModuleType("torch")
    torch.cuda = ModuleType("torch.cuda")
    torch.cuda.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(memory, "peak_bytes", lambda: {"allocated": 70 * GIB, "reserved": 78 * GIB})
    text = memory.explain(torch.cuda.OutOfMemoryError, 33 << 20, 0)
    return f"{text.partition(' with gradient accumulation')[0].removesuffix(' a smaller batch')} a smaller batch …"


def of_two_ranks(_: pytest.MonkeyPatch) -> str:
    window = with_fields(HEALTHY, duration_s=3.6, steps=steps(80, 0.0004, 0.042))
    report = make_report(window, Done(3.4, 80, None), run="r", name="train.py")
    report = replace(report, world_size=2, others={1: Verdict("compute", 0.9, "healthy")})
    return str(report).splitlines()[0]


def hang(_: pytest.MonkeyPatch) -> str:
    def standing(place: str, number: int, waits: bool) -> Standstill:
        return Standstill(place, (Collective("default_pg 0", number, "all_reduce", waits, True),))

    waits = standing("train (train.py:67)", 21, True)
    still = (waits, waits, standing("save (train.py:41)", 20, False))
    ranks = tuple(RankFacts(rank, MeanStep(9, 0.01, 0.0, 0.03), None, each) for rank, each in enumerate(still))
    finding = stalled(with_fields(HEALTHY, stalled_s=31.3, activity="step", ranks=ranks, standstill=waits))
    assert finding is not None
    return "\n  ".join([finding.title, *(each.text for each in finding.evidence)])


def letter(_: pytest.MonkeyPatch) -> str:
    hours = {"all": 577.0, "useful": 317.0, "starved": 192.0, "stalled": 48.0}
    cost = {"all": 1442.5, "starved": 480.83, "stalled": 120.21}
    worst = {"lost_hours": 240.0, "cause": "input_single_process", "advice": "set num_workers=8: about 3.1x faster"}
    alice = {"gpu_hours": hours, "cost": cost, "runs": {"resnet.a": worst}}
    found = {"days": 7, "gpu_hours": hours, "cost": cost, "currency": "EUR", "users": {"alice": alice}}
    return digest_text(found, 1795694400.0)  # noon in 2026, in every time zone the 26th of November


def tuned(_: pytest.MonkeyPatch) -> str:
    text = str(Machine(0.1, second_first_batch_s=0.1).sweep(0.04))
    return text.partition("\n- ")[0]


def shape(text: str) -> list[str]:
    """Return a table's lines with the settings of each row, without the figures of the machine that printed it."""
    found = []
    for line in text.splitlines():
        row = re.match(r" +(\d+) +(\d+|-) +(.*)", line)
        line = f"{row[1]} {row[2]} {re.sub(r'[0-9.]+', '#', row[3])}" if row else re.sub(r"[0-9.]+ ms", "# ms", line)
        found.append(re.sub(r" +", " ", line.replace("MiB", "#").replace("GiB", "#")))
    return found


OUTPUTS: dict[str, Callable[[pytest.MonkeyPatch], str]] = {
    "docs/guides/stacks.md: training  train.py:31 main": sampled_stacks,
    "docs/guides/stacks.md: rank 0  hang.py:4": hanging_ranks,
    "docs/guides/stacks.md: where compute 99%": breakdown,
    "docs/guides/stacks.md: gpuwatch: out of GPU memory": out_of_memory,
    "docs/guides/ddp.md: gpuwatch · train.py · rank 0": of_two_ranks,
    "docs/guides/ddp.md: training makes no progress": hang,
    "docs/deploy/notifications.md: gpuwatch · 7 days": letter,
    "docs/guides/tune.md: workers prefetch": tuned,
}


def one(beginning: str) -> Block:
    (block,) = (block for block in BLOCKS if str(block).startswith(beginning))
    return block


@pytest.mark.parametrize("beginning", OUTPUTS)
def test_an_output_is_what_is_printed(beginning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, printed = (each.rstrip("\n") for each in (one(beginning).text, OUTPUTS[beginning](monkeypatch)))
    if OUTPUTS[beginning] is tuned:
        assert shape(shown) == shape(printed)
    else:
        day = r"\d{4}-\d\d-\d\d"
        assert re.sub(day, "DAY", shown) == re.sub(day, "DAY", printed)


def test_what_another_test_compares_is_in_that_test() -> None:
    for beginning, test in ELSEWHERE.items():
        assert any(str(block).startswith(beginning) for block in BLOCKS), beginning
        page = "README" if beginning.startswith("README") else Path(beginning.partition(":")[0]).name
        text = (ROOT / "tests" / test).read_text()
        assert page in text, test


# Commands -------------------------------------------------------------------------------------------------------------

COMMANDS: Any = get_command(build(typer))
PROGRAMS = set(
    ["gpuwatch", "make", "pip", "python", "python3", "docker", "helm", "kubectl", "sudo", "install", "mkdir", "echo", "amtool", "openssl", "sbatch", "timeout", "git", "systemctl", "oauth2-proxy", ".venv/bin/python", ".venv-cuda/bin/python", "groupadd", "usermod"]
)  # fmt: skip
OF_OTHERS = {
    "docs/deploy/slurm.md: Prolog=": ROOT / "deploy/slurm/slurm.conf.example",
    "docs/deploy/systemd.md: [Service]": ROOT / "deploy/systemd/gpuwatch-agent.service",
}
"""Parts of other programs' files, and the file here whose keys they have."""


def statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a shell's text."""
    pending = ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        pending += line.removeprefix("$ ")
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # within quotes
            pending += "\n"
            continue
        pending, command = "", list[str]()
        for word in [*words, "&&"]:
            if word not in ("&&", "|", "||", ";"):
                command.append(word)
            elif command:
                yield command
                command = []
    assert not pending, "a quote is not closed"


def check(words: list[str]) -> None:
    """Raise AssertionError where a command of gpuwatch's is not one, or lacks one of these options."""
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    if words[:1] in (["timeout"], ["sudo"]):
        words = words[next(n for n, word in enumerate(words) if n and not re.match(r"-|\d", word)) :]
    if not words or words[0].rpartition("/")[2] != "gpuwatch":
        return
    command, rest = COMMANDS, words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    own = rest[: rest.index("--")] if "--" in rest else rest
    named = {word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)}
    assert named <= known, words


def is_shell(block: Block) -> bool:
    first = next(statements(block.text), [""])
    return re.sub(r"\w+=\S+", "", first[0]) in PROGRAMS or ("=" in first[0] and len(first) > 1 and first[1] in PROGRAMS)


def plain() -> list[Block]:
    """Return the blocks that are shell: those without a language but outputs, drawings, queries and others' files."""
    known = (*OUTPUTS, *ELSEWHERE, *DRAWINGS, *OF_OTHERS)
    return [block for block in in_language("", "sh") if not str(block).startswith(known) and not queries(block)]


def queries(block: Block) -> bool:
    begins = r"(?:[a-z_]+\()?(?:[a-z_]+ by \([^)]*\) \(|[a-z_]+\()*[a-z_:]*gpuwatch_|topk\(|sum by"
    return block.language == "promql" or (not block.language and re.match(begins, block.text) is not None)


def test_every_sample_is_of_a_kind_that_is_tested() -> None:
    languages = {"", "sh", "python", "json", "toml", "yaml", "promql"}
    assert {block.language for block in BLOCKS} <= languages
    assert [str(block) for block in plain() if not is_shell(block)] == [], "an output: add it to OUTPUTS"
    assert len(plain()) > 40 and len(BLOCKS) > 100


@pytest.mark.parametrize("block", plain(), ids=str)
def test_commands_have_the_options_and_files_that_a_sample_names(block: Block) -> None:
    for words in statements(block.text.replace("[OPTIONS]", "")):
        check(words)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|&& )make ([a-z-]+)", block.text, re.MULTILINE)) <= targets
    for name in re.findall(r"(?<![\w/.])(?:benchmarks|scripts|examples|deploy)/[\w./-]*\w", block.text):
        written = name.startswith(("deploy/alertmanager/secrets", "deploy/helm"))
        assert written or (ROOT / name).exists(), name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_within_the_text_have_their_options(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`(gpuwatch [a-z][^`]*)`", text):
        check(shlex.split(code.replace("…", "").replace("'", "").replace("\n", " ")))


def test_benchmarks_that_are_named_exist_and_have_the_options() -> None:
    programs = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): path.read_text()
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    named = set()
    sources = [path for path in (ROOT / "benchmarks").rglob("*") if path.suffix in (".py", ".md")]
    for path in [*PAGES, *(ROOT / ".github").rglob("*.yml"), *sources]:
        text = path.read_text()
        assert "python benchmarks/" not in text, f"{path}: python -m benchmarks.…"
        for program, words in re.findall(r"python -m (benchmarks(?:\.\w+)+)([^`\n#>]*)", text):
            assert program in programs, f"{path}: {program}"
            named.add(program)
            for option in re.findall(r"--([a-z-]+)", words):
                declared = f'"--{option}"', f"    {option}: Annotated"
                assert any(each in programs[program] for each in declared), f"{path}: {program} --{option}"
    assert named == set(programs)


def test_a_wrong_option_is_seen() -> None:
    for wrong in ("gpuwatch report last --jsn", "gpuwatch reprt", "timeout 10 /opt/bin/gpuwatch top --agnt x"):
        with pytest.raises(AssertionError):
            check(wrong.split())
    check(["gpuwatch", "run", "--trace", "--", "python", "train.py", "--jsn"])


def test_parts_of_other_programs_files_have_their_keys() -> None:
    for beginning, file in OF_OTHERS.items():
        keys = re.findall(r"^(\w+)=", one(beginning).text, re.MULTILINE)
        assert keys and set(keys) <= set(re.findall(r"^(\w+)=", file.read_text(), re.MULTILINE)), beginning


# Files, queries, code -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", in_language("toml"), ids=str)
def test_a_configuration_is_read(block: Block) -> None:
    parse_config(block.text, block.page)


@pytest.mark.parametrize("block", in_language("yaml"), ids=str)
def test_yaml_is_parsed(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict | list)


@pytest.mark.parametrize("block", in_language("python"), ids=str)
def test_code_is_python(block: Block) -> None:
    ast.parse(block.text.replace("(…)", "(...)"))


def test_names_in_code_are_there() -> None:
    """`gpuwatch.integrations.lightning` is none after `import gpuwatch`: it has to be imported."""
    code = "\n".join(block.text for block in in_language("python"))
    imported = r"^from (gpuwatch\.[\w.]+) import (\w+)$"
    for module, name in re.findall(imported, code, re.MULTILINE):
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(?:class|def) {name}\b", source, re.MULTILINE), f"{module}.{name}"
    used = set(re.findall(r"\bgpuwatch\.(\w+)", re.sub(imported, "", code, flags=re.MULTILINE)))
    assert used and used <= set(gpuwatch.__all__)


ANSWERS = {
    "docs/deploy/allocations.md": [AllocationFile],
    "docs/reference/api.md": [api.Status, api.Runs, api.LedgerOf, api.SeriesOf, api.LastSteps, api.Steps],
}
"""What the JSON of a page is, in its order; that of doctor.md is in tests/unit/doctor."""


@pytest.mark.parametrize("page", ANSWERS)
def test_json_has_the_fields_of_what_it_is(page: str) -> None:
    samples = [block.text for block in in_language("json") if block.page == page]
    for text, kind in zip(samples, ANSWERS[page], strict=True):
        text = re.sub(r', "…": \{\}', "", text.replace("[...]", "[]"))
        msgspec.json.decode(text, type=kind)
        assert set(msgspec.json.decode(text)) == set(kind.__struct_encode_fields__), kind
    assert {block.page for block in in_language("json")} == {*ANSWERS, "docs/guides/doctor.md"}


@pytest.mark.parametrize("block", [block for block in BLOCKS if queries(block)], ids=str)
def test_queries_read_metrics_that_exist(block: Block) -> None:
    recorded = {rule["record"] for group in groups(prices=Prices(1.0)) for rule in group["rules"] if "record" in rule}
    named = set(re.findall(r"(?<![\w:])(?:\w+:)?gpuwatch_\w+(?::\w+)?", block.text))
    assert named and named - BY_NAME.keys() - recorded == set()
