"""The subcommands: one file each, or one for those that belong together; the docstring of the function is its help. To add one, add a file here and a line below."""

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
