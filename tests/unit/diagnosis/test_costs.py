"""What GPU time costs."""

from __future__ import annotations

import pytest

from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis.rates import cost_of, money, parse_price, total_cost
from gpuwatch.errors import ConfigError


def test_a_states_cost_is_its_time_times_the_price_of_all_gpus_that_were_held() -> None:
    prices = Prices(gpu_hour=2.0, currency="EUR", models={"NVIDIA H200": 4.0})
    hourly = prices.hourly(["NVIDIA H200", "NVIDIA A10"])
    assert hourly == [4.0, 2.0]
    cost = cost_of({"compute": 1800.0, "input_wait": 3600.0, "eval": 0.0}, hourly, prices.currency)
    assert cost is not None
    assert (cost.gpus, cost.per_hour, cost.currency) == (2, 6.0, "EUR")
    assert cost.states == {"compute": 3.0, "input_wait": 6.0} and cost.total == 9.0
    assert cost.outside_compute == 6.0
    both = total_cost([cost, cost])
    assert both is not None and (both.gpus, both.per_hour, both.total) == (4, 12.0, 18.0)
    assert both.states == {"compute": 6.0, "input_wait": 12.0}


def test_the_energy_has_its_own_price() -> None:
    first, second = (cost_of({"compute": 3600.0}, [2.0], "EUR", joules, 0.25) for joules in (7.2e6, 3.6e6))
    assert first is not None and second is not None
    assert (first.energy, second.energy, first.total) == (0.5, 0.25, 2.0)
    unmeasured, unpriced = (
        cost_of({"compute": 1.0}, [2.0], "EUR", 0.0, 0.25),
        cost_of({"compute": 1.0}, [2.0], "EUR", 9.0),
    )
    assert unmeasured is not None and unmeasured.energy is None and unpriced is not None and unpriced.energy is None
    for costs, energy in (([first, second], 0.75), ([first, unmeasured], 0.5), ([unmeasured], None)):
        both = total_cost(costs)
        assert both is not None and both.energy == energy


def test_without_a_price_or_a_gpu_there_is_no_cost() -> None:
    assert Prices().hourly(["NVIDIA H200"]) == []


def test_mig_instance_costs_its_share_of_its_gpus_model() -> None:
    prices = Prices(gpu_hour=7.0, models={"NVIDIA A30": 4.0})
    names = ("NVIDIA H100 80GB HBM3", "1g.20gb"), ("NVIDIA H200", "1c.3g.71gb"), ("NVIDIA A100-SXM4-40GB", "7g.40gb")
    names = (*names, ("NVIDIA A30", "2g.12gb"), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "1g.24gb"))
    assert prices.hourly(f"{model} MIG {profile}" for model, profile in names) == [1.0, 1.0, 7.0, 2.0, 1.75]
    assert cost_of({"compute": 1800.0}, [], "USD") is None
    assert total_cost([]) is None


def test_a_price_from_the_environment() -> None:
    assert parse_price("4.2 EUR") == (4.2, "EUR")
    assert parse_price(" 4 ") == (4.0, "USD")
    assert parse_price("") is None and parse_price(" ") is None
    for wrong in ("cheap", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="GPUWATCH_GPU_HOUR"):
            parse_price(wrong)


def test_money_is_shown_to_the_cent_or_to_two_figures() -> None:
    assert [money(amount, "USD") for amount in (1234.5, 0.0, 0.0996, 0.00314)] == [
        "1,234.50 USD",
        "0.00 USD",
        "0.10 USD",
        "0.0031 USD",
    ]
    assert money(6.2e-07, "EUR") == "< 0.0001 EUR"
