"""The chart's objects against what they are for: Kubernetes' own schemas, the Prometheus operator's, promtool."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwatch.alerting.render import render as render_rules
from gpuwatch.alerting.thresholds import AlertThresholds
from gpuwatch.config import parse_config
from tests.charts import CHART, EVERYTHING, Manifest, manifests, one, render
from tests.servers import require

OPERATOR: Mapping[str, Any] = {"prometheus": {"operator": "always"}}
CASES = [{}, OPERATOR, EVERYTHING]
KUBERNETES = ("1.30", "1.34")


def test_lint_has_nothing_to_say_but_the_icon() -> None:
    helm = pytest.importorskip("helm_python")
    for values in CASES:
        messages = helm.lint(CHART, dict(values), strict=True)["messages"]
        assert [message["error"] for message in messages] == ["icon is recommended"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", CASES, ids=("default", "operator", "everything"))
def test_every_object_is_as_kubernetes_wants_it(values: Mapping[str, Any], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    checked = [each for each in manifests(values) if not each["apiVersion"].startswith("monitoring.coreos.com/")]
    for each in checked:
        validate(each, version, strict=True)
    assert {each["kind"] for each in checked} >= {"DaemonSet", "ServiceAccount", "ConfigMap"}


def test_a_name_of_digits_is_a_name() -> None:
    """Kubernetes lets releases, namespaces and Secrets be named `123` or `1e5`: YAML would make numbers of them."""
    validate = pytest.importorskip("kubernetes_validate").validate
    values = copy.deepcopy(dict(EVERYTHING))
    values["agent"] |= {
        "apiTokenSecret": "123", "priorityClassName": "7", "gpu": {"runtimeClassName": "12"},
        "tcp": {"enabled": True, "tokenSecret": "1e5"}, "web": {"configSecret": "007"},
        "history": {"hostPath": "/mnt/a, b: #c"},
    }  # fmt: skip
    for own in ({}, {"config": "", "configSecret": "99"}):
        values["agent"] |= own
        for each in manifests(values, release="123", namespace="456"):
            if not each["apiVersion"].startswith("monitoring.coreos.com/"):
                validate(each, KUBERNETES[0], strict=True)
            assert each["metadata"]["namespace"] == "456"
            assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "123"
    monitor = one(manifests(values, namespace="456"), "ServiceMonitor", "agent")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["456"]}


def test_kubernetes_schemas_refuse_a_misspelt_field() -> None:
    validation = pytest.importorskip("kubernetes_validate")
    daemonset = copy.deepcopy(one(manifests(), "DaemonSet", "agent"))
    daemonset["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(validation.ValidationError, match="hostPid"):
        validation.validate(daemonset, KUBERNETES[0], strict=True)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [(OPERATOR, {"PodMonitor", "PrometheusRule"}), (EVERYTHING, {"ServiceMonitor", "PrometheusRule"})],
)
def test_the_operators_objects_are_as_it_wants_them(values: Mapping[str, Any], kinds: set[str]) -> None:
    """Read by its own models and written again, nothing is lost: a key that they do not know would be."""
    v1 = pytest.importorskip("cloudcoil.models.prometheus_operator.v1")
    checked = [each for each in manifests(values) if each["apiVersion"] == "monitoring.coreos.com/v1"]
    assert {each["kind"] for each in checked} == kinds
    for each in checked:
        read = getattr(v1, each["kind"]).model_validate(each)
        assert json.loads(read.model_dump_json(by_alias=True, exclude_unset=True)) == each


def test_the_rules_in_the_cluster_are_the_rules(tmp_path: Path) -> None:
    """Through Helm's templates, of which their own `{{ }}` must not become a part, and past promtool."""
    spec = one(manifests(EVERYTHING), "PrometheusRule", "gpuwatch")["spec"]
    own = AlertThresholds(runbooks="https://example.com/runbooks", dashboards="https://grafana.example.com")
    assert spec == yaml.safe_load(render_rules(own))
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(spec))
    done = subprocess.run(
        [require("promtool"), "check", "rules", str(path)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_own_rules_take_their_place() -> None:
    link = "https://wiki.example.com/docs/runbooks/GpuLost.md"
    own = f"groups:\n- name: own\n  rules:\n  - alert: One\n    expr: vector(1)\n    annotations:\n      runbook_url: {link}\n"
    values = {"prometheus": {"operator": "always", "rules": {"content": own}}}
    assert one(manifests(values), "PrometheusRule", "gpuwatch")["spec"] == yaml.safe_load(own)


def test_dashboards_arrive_as_they_are() -> None:
    objects = [each for each in manifests() if "grafana_dashboard" in each["metadata"]["labels"]]
    sources = {path.name: path.read_text() for path in (CHART.parents[2] / "dashboards/grafana").glob("*.json")}
    found = {name: text for each in objects for name, text in each["data"].items()}
    assert {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(text) for name, text in sources.items()
    }
    assert max(len(json.dumps(each)) for each in objects) < 900_000  # the API takes 1 MiB


def test_no_object_asks_for_rights_of_the_api() -> None:
    objects = manifests(EVERYTHING)
    assert not {each["kind"] for each in objects} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    for kind, name in (("DaemonSet", "agent"), ("Deployment", "dashboard")):
        assert one(objects, kind, name)["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert one(objects, "ServiceAccount", "gpuwatch")["automountServiceAccountToken"] is False


def test_what_the_containers_may_do() -> None:
    objects = manifests(EVERYTHING)
    agent = _container(one(manifests(), "DaemonSet", "agent"))["securityContext"]
    assert agent["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "DAC_READ_SEARCH", "SYS_PTRACE"]}
    other = _container(one(objects, "DaemonSet", "agent"))  # for instances of MIG, and without the group
    assert other["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": ["DAC_READ_SEARCH", "SYS_ADMIN", "SYS_PTRACE"],
    }
    assert {"name": "NVIDIA_MIG_MONITOR_DEVICES", "value": "all"} in other["env"]
    dashboard = _container(one(objects, "Deployment", "dashboard"))["securityContext"]
    assert dashboard["capabilities"] == {"drop": ["ALL"]}
    for security in (agent, other["securityContext"], dashboard):
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    deployment = one(objects, "Deployment", "dashboard")
    assert deployment["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]


def test_a_secret_takes_the_place_of_the_configuration() -> None:
    """Tokens and passwords of [notify] then are in no ConfigMap; the agent finds the file in the same place."""
    objects = manifests({"agent": {"configSecret": "gpuwatch-notify"}})
    assert list(one(objects, "ConfigMap", "gpuwatch-agent")["data"]) == ["group"]
    volumes = one(objects, "DaemonSet", "agent")["spec"]["template"]["spec"]["volumes"]
    secret, config_map = next(each["projected"]["sources"] for each in volumes if each["name"] == "config")
    assert secret["secret"] == {
        "name": "gpuwatch-notify",
        "items": [{"key": "gpuwatch.toml", "path": "gpuwatch.toml"}],
    }
    assert config_map == {"configMap": {"name": "demo-gpuwatch-agent"}}


def test_the_page_warns_from_the_sites_own_thresholds_on_and_has_no_secret() -> None:
    dashboard = {"enabled": True, "prometheus": "http://prometheus:9090"}
    objects = manifests({"dashboard": dashboard, "agent": {"config": "[thresholds]\nshm_used = 0.5"}})
    page = one(objects, "Deployment", "dashboard")
    assert {"name": "GPUWATCH_CONFIG", "value": "/etc/gpuwatch/gpuwatch.toml"} in _container(page)["env"]
    assert {"name": "config", "mountPath": "/etc/gpuwatch", "readOnly": True} in _container(page)["volumeMounts"]
    volumes = page["spec"]["template"]["spec"]["volumes"]
    assert {"name": "config", "configMap": {"name": "demo-gpuwatch-agent"}} in volumes
    text = one(objects, "ConfigMap", "gpuwatch-agent")["data"]["gpuwatch.toml"]
    assert parse_config(text, "the ConfigMap").thresholds.shm_used == 0.5
    objects = manifests({"dashboard": dashboard, "agent": {"configSecret": "gpuwatch-notify"}})
    without = one(objects, "Deployment", "dashboard")
    assert "GPUWATCH_CONFIG" not in str(without) and "gpuwatch-notify" not in str(without)


def test_who_may_connect_is_named_by_policies_that_select_the_pods() -> None:
    assert not [each for each in manifests() if each["kind"] == "NetworkPolicy"]
    objects = manifests(EVERYTHING)
    for component, kind, port in (("agent", "DaemonSet", 19478), ("dashboard", "Deployment", 8501)):
        policy = one(objects, "NetworkPolicy", f"gpuwatch-{component}")["spec"]
        labels = one(objects, kind, component)["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        rule, *over_tcp = policy["ingress"]
        assert over_tcp == ([{"ports": [{"protocol": "TCP", "port": 19479}]}] if component == "agent" else [])
        assert rule["ports"] == [{"protocol": "TCP", "port": port}]
        assert rule["from"] == [{"podSelector": {}}, *EVERYTHING["networkPolicy"]["from"]]


def test_the_agents_options_are_those_of_the_agent(tmp_path: Path) -> None:
    """The arguments of the DaemonSet, its file next to them, through the real command: it starts and then stops."""
    from tests.integration.agent_process import Agent

    objects = manifests(EVERYTHING)
    arguments = _container(one(objects, "DaemonSet", "agent"))["args"]
    config = tmp_path / "gpuwatch.toml"
    config.write_text(one(objects, "ConfigMap", "gpuwatch-agent")["data"]["gpuwatch.toml"])
    here = {"/etc/gpuwatch/gpuwatch.toml": str(config)}
    given = {option.split("=", 1)[0]: option.split("=", 1)[1] for option in reversed(arguments[1:]) if "=" in option}
    assert given["--http"] == "0.0.0.0:19478" and given["--listen"] == "ipc:///run/gpuwatch/hook.sock"
    rest = [each for each in arguments[1:] if "=" not in each]
    with Agent(tmp_path, f"--config={here[given['--config']]}", *rest) as agent:
        assert agent.get_text("/healthz") == "ok\n"
        assert agent.stop() == 0


def test_tokens_come_from_secrets_and_the_page_has_the_agents() -> None:
    def environment(objects: list[Manifest], kind: str, name: str) -> dict[str, Any]:
        return {
            each["name"]: each.get("value") or each["valueFrom"].get("secretKeyRef")
            for each in _container(one(objects, kind, name))["env"]
        }

    assert environment(manifests(), "DaemonSet", "agent")["GPUWATCH_API_TOKEN_FILE"] == "/var/lib/gpuwatch/api-token"
    objects = manifests(EVERYTHING)
    agent, page = environment(objects, "DaemonSet", "agent"), environment(objects, "Deployment", "dashboard")
    assert agent["GPUWATCH_API_TOKEN"] == page["GPUWATCH_API_TOKEN"] == {"name": "api-token", "key": "token"}
    assert agent["GPUWATCH_TOKEN"] == {"name": "hook-token", "key": "token"}
    assert not [each for each in objects if each["kind"] == "Secret"], "they are the site's"


def test_the_training_pod_of_the_page_is_one_and_is_what_the_agent_listens_for() -> None:
    """With no hostPath: what Pod Security "baseline" allows."""
    page = (CHART.parents[2] / "docs/deploy/kubernetes.md").read_text()
    text = next(block for block in page.split("```yaml\n")[1:] if "tcp://" in block).partition("```")[0]
    spec = yaml.safe_load(text)["spec"]
    spec["containers"][0]["image"] = "train"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": spec}
    pytest.importorskip("kubernetes_validate").validate(pod, KUBERNETES[0], strict=True)
    assert "hostPath" not in text
    environment = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    mounted = spec["containers"][0]["volumeMounts"][0]["mountPath"]
    items = spec["volumes"][0]["projected"]["sources"][0]["secret"]["items"]
    assert environment["GPUWATCH_TOKEN_FILE"] == f"{mounted}/{items[0]['path']}"
    agent = _container(one(manifests({"agent": {"tcp": {"enabled": True, "tokenSecret": "x"}}}), "DaemonSet", "agent"))
    port = next(each for each in agent["ports"] if each["name"] == "hook")
    assert environment["GPUWATCH_ENDPOINT"] == f"tcp://$(NODE_ADDRESS):{port['hostPort']}"
    assert f"--listen=tcp://0.0.0.0:{port['containerPort']}" in agent["args"]


def test_where_pods_have_ipv6_addresses_only_they_listen_on_those() -> None:
    """The kubelet probes a pod at its address: nothing answered there, and the agent was restarted for ever."""
    values = {**EVERYTHING, "ipv6": True}
    objects = manifests(values)
    agent, page = _container(one(objects, "DaemonSet", "agent")), _container(one(objects, "Deployment", "dashboard"))
    assert {"--http=[::]:19478", "--listen=tcp://[::]:19479"} <= set(agent["args"]) and "--host=::" in page["args"]
    assert {"name": "GPUWATCH_ADDRESS", "value": "[$(POD_ADDRESS)]:19478"} in agent["env"]
    assert "tcp://[$(NODE_ADDRESS)]:19479" in render(values)["NOTES.txt"]


def test_the_scrape_job_of_the_page_scrapes_each_agent_once() -> None:
    """`role: pod` has a target for each port of a container: that of the hooks was always down."""
    page = (CHART.parents[2] / "docs/deploy/kubernetes.md").read_text()
    text = next(block for block in page.split("```yaml\n")[1:] if "kubernetes_sd_configs" in block).partition("```")[0]
    keeps = [each for job in yaml.safe_load(text) for each in job["relabel_configs"] if each.get("action") == "keep"]
    container = _container(one(manifests(EVERYTHING), "DaemonSet", "agent"))
    label = "__meta_kubernetes_pod_container_port_name"
    kept = [each["regex"] for each in keeps if each["source_labels"] == [label]]
    assert len(container["ports"]) == 2 and kept == ["http"] == [
        p["name"] for p in container["ports"] if p["name"] in kept
    ]


@pytest.mark.parametrize(
    ("values", "output"),
    [
        ({"agent": {"prot": 9478}}, "prot"),
        ({"agent": {"port": 0}}, "/agent/port"),
        ({"agent": {"tcp": {"enabled": True}}}, "agent.tcp.tokenSecret: a Secret with the key"),
        ({"agent": {"web": {"scheme": "https"}}}, "/agent/web/scheme"),
        ({"agent": {"socket": {"hostPath": "run"}}}, "/agent/socket/hostPath"),
        ({"agent": {"maxUnavailable": "all"}}, "/agent/maxUnavailable"),
        ({"prometheus": {"monitor": "Probe"}}, "/prometheus/monitor"),
        ({"networkPolicy": {"from": [{}]}}, "/networkPolicy/from/0"),
        ({"agent": {"config": "[agent]", "configSecret": "mine"}}, "agent.config and agent.configSecret both give"),
        ({"dashboard": {"enabled": True}}, "dashboard.prometheus: the address of your Prometheus"),
        ({"dashboard": {"prometheus": "prometheus:9090"}}, "/dashboard/prometheus"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values: Mapping[str, Any], output: str) -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises((helm.HelmValuesError, helm.HelmRenderError), match=output):
        render(values)


def test_the_notes_say_how_training_pods_reach_the_agent() -> None:
    notes = render()["NOTES.txt"]
    assert "supplementalGroups: [9478]" in notes and "hostPath: {path: /run/gpuwatch}" in notes
    assert "nothing scrapes the agents yet" in notes
    notes = render(EVERYTHING)["NOTES.txt"]
    assert "tcp://$(NODE_ADDRESS):19479" in notes and "secretKeyRef: {name: hook-token, key: token}" in notes
    assert "supplementalGroups" not in notes and "hostPath: {path: /run/other}" in notes
    assert "gets a ServiceMonitor and the alert rules." in notes


def _container(workload: Manifest) -> Manifest:
    containers = workload["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    return dict(containers[0])
