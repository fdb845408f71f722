"""The configuration file: every section reaches its dataclass, every wrong key is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuwatch.config import AgentSettings, Config, NotifySettings, own_config, parse_config, read_config
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.errors import ConfigError
from tests.programs import ROOT


def test_every_section_is_read() -> None:
    config = parse_config(
        """
        [agent]
        http = "0.0.0.0:9478"
        listen = ["ipc:///run/gpuwatch/hook.sock"]
        keep_days = 30
        [thresholds]
        input_share = 0.2
        [alerts]
        starved_ratio = 0.3
        [prices]
        gpu_hour = 2.5
        currency = "EUR"
        models = {"NVIDIA H200" = 4.2}
        kwh = 0.25
        [notify]
        urls = ["json://127.0.0.1:5001/alerts"]
        min_severity = "critical"
        """,
        "gpuwatch.toml",
    )
    assert config.agent == AgentSettings("0.0.0.0:9478", ("ipc:///run/gpuwatch/hook.sock",), keep_days=30)
    assert config.thresholds.input_share == 0.2
    assert config.alerts.starved_ratio == 0.3
    assert (config.prices.gpu_hour, config.prices.currency, config.prices.models) == (2.5, "EUR", {"NVIDIA H200": 4.2})
    assert config.prices.kwh == 0.25
    assert config.notify == NotifySettings(("json://127.0.0.1:5001/alerts",), "critical")


def test_an_empty_file_is_the_defaults() -> None:
    assert parse_config("", "gpuwatch.toml") == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[alert]", "f: [alert] is not a section; did you mean alerts?"),
        ("http = 'x'", "f: http = … is outside of a section; move it below [agent]"),
        ("htp = 'x'", "f: [htp] is not a section; there are: agent, "),
        ("alerts = 3", "f: alerts = … is outside of a section"),
        ("[alerts]\nstarved_ration = 0.3", "f: [alerts] starved_ration is not a key; did you mean starved_ratio?"),
        ("[alerts]\nstarved_ratio = 30", "f: [alerts] starved_ratio = 30: a share"),
        ("[alerts]\nstarved_ratio = '0.3'", "f: [alerts] starved_ratio = '0.3': expected `float`, got `str`"),
        ("[alerts]\nstarved_ratio = true", "f: [alerts] starved_ratio = True: expected `float`, got `bool`"),
        ("[prices]\ngpu_hour = true", "f: [prices] gpu_hour = True: expected `float | null`, got `bool`"),
        (
            "[prices]\ngpu_hour = 1\nmodels = {x = true}",
            "f: [prices] models = {'x': True}: expected `float`, got `bool`",
        ),
        ("[alerts]\njob = 3", "f: [alerts] job = 3: expected `str`, got `int`"),
        ("[agent]\nlisten = 'ipc:///x'", "f: [agent] listen = 'ipc:///x': expected `array`, got `str`"),
        ("[agent]\nhttp = 9478", "f: [agent] http = 9478: expected `str`, got `int`"),
        ("[agent]\nkeep_days = 0", "f: [agent] keep_days = 0: expected `float` >= 0.01"),
        ("[agent]\nkeep_days = inf", "f: [agent] keep_days = inf: expected `float` <= 36500.0"),
        ("[agent]\nkeep_gib = 1e300", "f: [agent] keep_gib = 1e+300: expected `float` <= 1000000.0"),
        ("[agent]\nfull_hours = inf", "f: [agent] full_hours = inf: expected `float` <= 876000.0"),
        ("[stacks]\nseconds = inf", "f: [stacks] seconds = inf: expected `float` <= 600.0"),
        (
            "[prices]\ngpu_hour = inf",
            "f: [prices] gpu_hour = inf: the price of a GPU-hour must be a finite number above 0",
        ),
        ("[prices]\ngpu_hour = -1", "f: [prices] gpu_hour = -1.0: the price"),
        (
            "[prices]\ngpu_hour = 1\nkwh = 0",
            "f: [prices] kwh = 0.0: the price of a kWh must be a finite number above 0",
        ),
        ("[prices]\nkwh = 0.25", "f: [prices] gpu_hour is missing"),
        ("[prices]\ngpu_hour = 1\nmodels = 4", "f: [prices] models = 4: expected `object`"),
        ("[notify]\nmin_severity = 'debug'", "f: [notify] min_severity = 'debug': give info or warning or critical"),
        ("[agent]\nseries = 'all'", "f: [agent] series = 'all': give standard or full"),
        ("[agent]\nlisten = ['ipc:///x', 3]", "f: [agent] listen = ['ipc:///x', 3]: expected `str`, got `int`"),
        ("[stacks]\nautomatic = 1", "f: [stacks] automatic = 1: expected `bool`, got `int`"),
        ("[stacks]\nrate_hz = 0", "f: [stacks] rate_hz = 0: expected `int` >= 1"),
        ("[thresholds]\nmin_steps = 2.5", "f: [thresholds] min_steps = 2.5: expected `int`, got `float`"),
        ("[notify\n", "f: "),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(text, "f")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--config {tmp_path}/no.toml: No such file")):
        read_config(tmp_path / "no.toml")
    monkeypatch.setenv("GPUWATCH_CONFIG", f"{tmp_path}/no.toml")
    for read in (own_config, lambda: read_config(tmp_path / "no.toml")):  # as a command has it from the environment
        with pytest.raises(ConfigError) as wrong:
            read()
        expected = f"GPUWATCH_CONFIG {tmp_path}/no.toml: No such file or directory; name a TOML file that can be read"
        assert str(wrong.value) == repr(wrong.value) == expected, "the hook's warning has its text alone"
    (tmp_path / "latin.toml").write_bytes(b"[agent]\nhttp = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_config(tmp_path / "latin.toml")


def test_an_alert_shares_its_threshold_with_the_diagnosis_unless_it_has_its_own() -> None:
    assert Config().alerts.shm_used_ratio == Thresholds().shm_used_critical == 0.9
    alone = parse_config("[thresholds]\nshm_used_critical = 0.85\nrank_pace = 0.2", "f")
    assert (alone.alerts.shm_used_ratio, alone.alerts.rank_pace_ratio) == (0.85, 0.2)
    both = parse_config("[thresholds]\nshm_used_critical = 0.85\n[alerts]\nshm_used_ratio = 0.7", "f")
    assert (both.alerts.shm_used_ratio, both.thresholds.shm_used_critical) == (0.7, 0.85)


def test_the_shipped_example_is_read_and_says_the_defaults() -> None:
    assert read_config(ROOT / "deploy/gpuwatch.toml").alerts == Config().alerts
