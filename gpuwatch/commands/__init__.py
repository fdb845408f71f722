"""The subcommands, one or a few a file; a function's docstring is its help. To add one, add a file and a line below."""

from gpuwatch.commands.agent import agent
from gpuwatch.commands.demo import demo
from gpuwatch.commands.doctor import doctor
from gpuwatch.commands.grafana import grafana, rules
from gpuwatch.commands.report import compare, digest, report
from gpuwatch.commands.run import run
from gpuwatch.commands.stacks import stacks, trace
from gpuwatch.commands.tune import tune
from gpuwatch.commands.up import dashboard, top, up

COMMANDS = (up, top, run, agent, dashboard, demo, rules, grafana, doctor, tune, report, compare, digest, stacks, trace)
