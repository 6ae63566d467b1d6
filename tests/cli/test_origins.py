"""Goal: a setting has one name everywhere, and flag beats environment beats file beats default, whatever is set where.
Method: random choices of sources against a line that says the same; the command in this process; each kind of mistake.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyengine import env
from pyengine.cli import app
from pyengine.commands.config import KINDS, descriptions, reference_text
from pyengine.config import ConfigError, GatewayConfig, ServeConfig
from pyengine.origins import KINDS as READ
from pyengine.origins import flag, load, trace

ROOT = Path(__file__).parents[2]
#: Settings of each type, and values they may have: as a flag or a file has them, and as the environment spells them.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["a", "b c", "ü/ü", "7", "true"]),
    "port": st.integers(1, 65535),
    "slo_ttft": st.floats(0, 1e6),
    "tls": st.booleans(),
    "dram_bytes": st.integers(0, 1 << 50),
    "cors_origin": st.lists(st.sampled_from(["https://a", "https://b:1"]), max_size=3),
}


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def toml(named: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in named.items())


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.settings():
        monkeypatch.delenv(env.variable(name))


SOURCES = st.dictionaries(
    st.sampled_from(sorted(VALUES)), st.sets(st.sampled_from(["flag", "environment", "file"])), max_size=len(VALUES)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=SOURCES, data=st.data())
def test_the_first_source_wins(where: dict[str, set[str]], data: st.DataObject, tmp_path: Path) -> None:
    drawn = {
        source: {name: data.draw(VALUES[name]) for name, sources in where.items() if source in sources}
        for source in ("flag", "environment", "file")
    }
    file = tmp_path / "settings.toml"
    file.write_text(toml(drawn["file"]))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in drawn["environment"].items():
            patch.setenv(env.variable(name), spelled(value))
        config, found = trace(ServeConfig, file, drawn["flag"])
    for name in VALUES:
        sources = [source for source in ("flag", "environment", "file") if name in drawn[source]]
        wanted = drawn[sources[0]][name] if sources else getattr(ServeConfig(), name)
        got = getattr(config, name)
        assert (list(got) if isinstance(got, tuple) else got) == (list(wanted) if name == "cors_origin" else wanted)
        origins = {"flag": flag(name), "environment": env.variable(name), "file": str(file)}
        origin = next(each.origin for each in found if each.name == name)
        assert origin == (origins[sources[0]] if sources else "default")
    assert [each.name for each in found] == list(ServeConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"PYENGINE_DRAM_BITES": "1"}, "PYENGINE_DRAM_BITES; did you mean PYENGINE_DRAM_BYTES?"),
        ({"PYENGINE_ZZZZZZ": "1"}, "known are: .*PYENGINE_API_KEY"),
        ({"PYENGINE_PORT": "eighty"}, "PYENGINE_PORT is 'eighty'; port is a whole number"),
        ({"PYENGINE_TLS": "maybe"}, "tls is true or false"),
        ({"PYENGINE_SLO_TTFT": "soon"}, "slo_ttft is a number"),
        ({"PYENGINE_DRAM_BYTES": "lots"}, "environment: dram_bytes: 'lots' is not a size"),
        ({"PYENGINE_SLO_CLASS": "[{"}, "PYENGINE_SLO_CLASS is no JSON"),
        ({"PYENGINE_SLO_CLASS": '[{"tfft": 1}]'}, "slo_class"),
        (
            {"PYENGINE_CONFIG": "/nowhere/at/all.toml"},
            "cannot read the configuration /nowhere/at/all.toml.*PYENGINE_CONFIG",
        ),
    ],
)
def test_mistakes_in_the_environment(variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=says):
        load(ServeConfig, None, {})


def test_a_mistake_is_told_of_its_source_though_another_wins(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('port = "x"\n')
    with pytest.raises(ConfigError, match=r"a\.toml: Expected `int`, got `str` - at `\$\.port`"):
        load(ServeConfig, file, {"port": 1})


def test_one_environment_serves_several_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A gateway is not bothered by what is for workers; what is empty, or the tests' own, is nothing."""
    others = {"PYENGINE_DRAM_BYTES": "1GiB", "PYENGINE_TP": "", "PYENGINE_TEST_ALL": "x", "PYENGINE_API_KEY": "k"}
    for name, text in others.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("PYENGINE_SLO_CLASS", '[{"name": "fast", "ttft": 0.5}]')
    config = load(GatewayConfig, None, {"conductor": "c", "secret_file": "s"})
    assert config.slo_class[0].ttft == 0.5
    assert load(ServeConfig, None, {}).tp == 1


def test_children_take_no_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else PYENGINE_PORT would override what `serve --port` has told its gateway by a file."""
    kept = {"PYENGINE_STATE_DIR": "/s", "PYENGINE_LOG_LEVEL": "debug", "PYENGINE_TEST_X": "1", "HOME": "/h"}
    dropped = {"PYENGINE_PORT": "1", "PYENGINE_CONFIG": "/c", "PYENGINE_API_KEY": "k"}
    for name, text in (kept | dropped).items():
        monkeypatch.setenv(name, text)
    told = env.for_children()
    assert kept.items() <= told.items() and not dropped.keys() & told.keys()
    assert told.keys() <= os.environ.keys()


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: str) -> tuple[int, str, str]:
        status = app(["config", *words], exit_on_error=False, result_action="return_value")
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_config_shows_what_serve_would_run_with(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.toml"
    file.write_text('model = "m"\nport = 1\n')
    monkeypatch.setenv("PYENGINE_CONFIG", str(file))
    monkeypatch.setenv("PYENGINE_PORT", "2")
    status, out, err = call("--json", "serve", "--backend", "fake")
    shown = json.loads(out)
    assert (status, err) == (0, "") and shown.keys() == set(ServeConfig.__struct_fields__)
    assert shown["model"] == {"value": "m", "origin": str(file)}
    assert shown["port"] == {"value": 2, "origin": "PYENGINE_PORT"}
    assert shown["backend"] == {"value": "fake", "origin": "--backend"}
    assert shown["tp"] == {"value": 1, "origin": "default"}
    assert shown["threads"]["origin"] == shown["kv_bytes"]["origin"] == "derived" and shown["threads"]["value"] >= 1
    status, out, _ = call("--backend", "fake", "--port", "3")
    assert status == 0 and any(line.split() == ["port", "3", "--port"] for line in out.splitlines())


def test_config_refuses_what_the_command_would_refuse(call: Call) -> None:
    assert call("serve", "--prefill", "1")[0] == 2
    assert "--decode 1" in call("serve", "--prefill", "1")[2]
    assert "did you mean serve?" in call("sevre")[2]
    assert "missing required field `worker`" in call("worker", "--config", os.devnull)[2]


@pytest.mark.parametrize("kind", READ)
def test_every_setting_is_described(kind: type[msgspec.Struct]) -> None:
    assert descriptions(kind).keys() == set(kind.__struct_fields__)


def test_a_setting_that_is_not_described_is_found() -> None:
    class Silent(msgspec.Struct):
        """told: in words. A sentence on untold things."""

        told: int = 0
        untold: int = 0

    with pytest.raises(ValueError, match="says nothing of untold"):
        descriptions(Silent)


def test_every_flag_is_a_setting_of_the_same_name() -> None:
    """But for those that name a file or a descriptor."""
    for command, kind in KINDS.items():
        flags = {argument.field_info.name for argument in app[command].assemble_argument_collection()}
        assert flags - set(kind.__struct_fields__) <= {"file", "ready_fd", "listen_fd"}


def test_the_reference_is_what_the_code_says() -> None:
    """To write it anew: pyengine config --reference > docs/configuration.md."""
    assert (ROOT / "docs/configuration.md").read_text() == reference_text()


def test_what_kubernetes_adds_for_a_service_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documentation's list for a Service of two named ports, and for one whose name goes on."""
    for service in ("PYENGINE", "PYENGINE_GATEWAY", "PYENGINE_HTTP_2"):
        added = {
            "SERVICE_HOST": "10.0.0.11",
            "SERVICE_PORT": "8000",
            "SERVICE_PORT_HTTP": "8000",
            "SERVICE_PORT_DNS_UDP": "53",
            "PORT": "tcp://10.0.0.11:8000",
        }
        for port, protocol in ((8000, "tcp"), (53, "udp"), (9, "sctp")):
            address = f"{protocol}://10.0.0.11:{port}"
            link = f"PORT_{port}_{protocol.upper()}"
            added |= {link: address, f"{link}_PROTO": protocol, f"{link}_PORT": str(port), f"{link}_ADDR": "10.0.0.11"}
        for name, text in added.items():
            monkeypatch.setenv(f"{service}_{name}", text)
    assert load(ServeConfig, None, {}) == ServeConfig()
    # What somebody sets is still taken, and a mistake still said.
    monkeypatch.setenv("PYENGINE_PORT", "8123")
    assert load(ServeConfig, None, {}).port == 8123
    monkeypatch.setenv("PYENGINE_CONDUCTOR", "tcp://10.0.0.11:8000")
    assert "conductor" in env.settings()
    monkeypatch.setenv("PYENGINE_SERVICE_HOTS", "x")
    with pytest.raises(ConfigError, match="PYENGINE_SERVICE_HOTS"):
        load(ServeConfig, None, {})
