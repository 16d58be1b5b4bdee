"""Break the privacy mechanism on purpose, one way at a time, and see which test notices: ``make mutants``.

Each mutant is a copy of the project with a few words changed. It must be killed by a test that is named here; a mutant
that survives means that a promise is not tested.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import scipy.stats  # noqa: F401
import torch  # noqa: F401

PROJECT = Path(__file__).resolve().parents[1]
_FOLDERS = ("client", "common", "deployment", "server", "simulations", "tests")
_MECHANISM, _ENFORCEMENT = "tests/privacy/test_mechanism.py", "tests/privacy/test_enforcement.py"
_SELECTING, _PUBLISHED = "tests/methods/test_selecting.py", "tests/privacy/test_published_selection.py"
_CLIENT = "tests/privacy/test_client_unit.py"
_METHODS = "tests/methods/test_conformance.py"
_RENYI = "tests/common/test_renyi.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is broken: changes of one file, and the test that must notice."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    killer: str


_DEPLOYMENT = "tests/deployment"
_CLAIMS = "tests/simulations/test_claims.py"
_NETWORKS = "tests/simulations/test_models_and_data.py::test_other_peoples_networks_train_unchanged"
_REFUSED = "tests/client/test_clipping.py::test_models_that_cannot_be_clipped_are_refused_by_name"
_CLUSTERS = "tests/simulations/test_ray_grid.py::test_a_cluster_is_looked_for_only_where_one_is_asked_for"
_VERSIONS = "tests/test_formats.py::test_another_version_is_the_error_of_versions"
_ASKED = 'asked = address or os.environ.get("RAY_ADDRESS") or "local"'
_FAILURE = "test_a_failure_after_the_charge_is_logged_at_the_site_told_to_nobody_and_not_tried_again"
_GUESS = "first if t.dim() > first and t.shape[first] == tensors[0].shape[first] else None"
_FACTORS = "factors = self._clip_norm / norms.clamp(min=self._clip_norm)"
_TOTAL = "total = step.gradient_sum(*data.batch(rows, device))"
_CHARGE = "entry = ledger.charge(plan, plan_bytes, policy.server_key)"
_LARGEST = (
    "torch.topk(model.gradient(*data.batch(__import__('numpy').arange(data.size), model.vector.device)).abs(), "
    "plan.mask.kept).indices.sort().values"
)

MUTANTS = (
    Mutant(
        "no clip",
        "client/clipping/book_keeping.py",
        ((_FACTORS, "factors = torch.ones_like(norms)"),),
        f"{_MECHANISM}::test_one_record_changes_the_sum_by_at_most_the_clip_norm",
    ),
    Mutant(
        "clip norm ignored",
        "client/clipping/book_keeping.py",
        (("self._clip_norm = clip_norm", "self._clip_norm = 1.0"),),
        f"{_MECHANISM}::test_one_record_changes_the_sum_by_at_most_the_clip_norm",
    ),
    Mutant(
        "records that are not finite let through",
        "client/clipping/book_keeping.py",
        (("finite = norms.isfinite()", "finite = torch.ones_like(norms, dtype=torch.bool)"),),
        f"{_MECHANISM}::test_one_record_changes_the_sum_by_at_most_the_clip_norm",
    ),
    Mutant(
        "noise / 2",
        "client/dpsgd.py",
        (
            (
                "noise_std = plan.noise_multiplier * plan.clip_norm",
                "noise_std = plan.noise_multiplier * plan.clip_norm / 2",
            ),
        ),
        f"{_MECHANISM}::test_noise_has_the_promised_scale",
    ),
    Mutant(
        "noise scaled by the batch",
        "client/dpsgd.py",
        (("alpha=noise_std)", "alpha=noise_std * len(rows) / expected_batch)"),),
        "tests/client/test_dpsgd.py::test_an_empty_batch_is_a_step_like_any_other",
    ),
    Mutant(
        "noise once per round",
        "client/dpsgd.py",
        (("        if step.adds_noise:", "        if step.adds_noise and not steps_done:"),),
        f"{_MECHANISM}::test_every_step_draws_noise_of_its_own",
    ),
    Mutant(
        "no noise on an empty batch",
        "client/dpsgd.py",
        (("        if step.adds_noise:", "        if step.adds_noise and len(rows):"),),
        "tests/client/test_dpsgd.py::test_an_empty_batch_is_a_step_like_any_other",
    ),
    Mutant(
        "clip before mask",
        "client/clipping/book_keeping.py",
        (("masks = _by_parameter(model, kept)", "masks = _by_parameter(model, None)"),),
        "tests/client/test_clipping.py::test_the_mask_goes_before_the_clip",
    ),
    Mutant(
        "mask from data",
        "client/dpsgd.py",
        (("kept = _kept_on(model, plan)", f"kept = {_LARGEST}"),),
        "tests/client/test_dpsgd.py::test_off_the_mask_nothing_changes_by_one_bit",
    ),
    Mutant(
        "mean before noise",
        "client/dpsgd.py",
        ((_TOTAL, f"{_TOTAL} / max(1, len(rows)) * expected_batch"),),
        f"{_MECHANISM}::test_the_divisor_does_not_depend_on_the_batch",
    ),
    Mutant(
        "charge after release",
        "client/site.py",
        ((_CHARGE, "entry = None"), ("ledger.keep(entry,", f"{_CHARGE}\n        ledger.keep(entry,")),
        f"{_ENFORCEMENT}::test_a_crash_after_the_charge_leaves_a_charge_that_can_be_used",
    ),
    Mutant(
        "second draw on a repeated request",
        "client/site.py",
        (("return kept", "return self._release(plan, self._loaded(plan, model_bytes), progress)"),),
        f"{_ENFORCEMENT}::test_the_same_round_gives_the_same_bytes_and_is_charged_once",
    ),
    Mutant(
        "shuffled batches instead of Poisson",
        "common/randomness.py",
        (
            (
                "return np.flatnonzero(self._sampling.uniforms(size) < sampling_rate).astype(np.int64, copy=False)",
                "return np.sort(np.argsort(self._sampling.uniforms(size))[: round(size * sampling_rate)])",
            ),
        ),
        f"{_MECHANISM}::test_inclusion_is_bernoulli_and_independent",
    ),
    Mutant(
        "ledger not synced",
        "client/ledger.py",
        (("synchronous = EXTRA", "synchronous = OFF"),),
        "tests/client/test_ledger.py::test_entries_are_synced_to_the_disk",
    ),
    Mutant(
        "head of the ledger not synced",
        "common/files.py",
        (("os.fsync(file.fileno())", "file.flush()"),),
        "tests/client/test_ledger.py::test_entries_are_synced_to_the_disk",
    ),
    Mutant(
        "budget not checked",
        "client/policy.py",
        (("if spent > self.epsilon:", "if False:"),),
        f"{_ENFORCEMENT}::test_the_budget_ends_a_run_and_all_runs_share_it",
    ),
    Mutant(
        "signature not checked",
        "client/site.py",
        (("if key and not is_signed_by", "if False and not is_signed_by"),),
        f"{_ENFORCEMENT}::test_only_the_servers_own_plans_are_obeyed",
    ),
    Mutant(
        "same noise in every round",
        "common/randomness.py",
        (
            (
                "KeyStream(secrets.token_bytes(32)), KeyStream(secrets.token_bytes(32))",
                "KeyStream(bytes(32)), KeyStream(bytes(32))",
            ),
        ),
        f"{_MECHANISM}::test_noise_of_different_sites_rounds_and_restarts_is_unrelated",
    ),
    Mutant(
        "client: update not clipped by the server",
        "server/aggregate.py",
        (("total += clipped(values, clip_norm)", "total += values"),),
        f"{_CLIENT}::test_one_site_changes_the_sum_by_at_most_the_clip_norm",
    ),
    Mutant(
        "select: the published sensitivity",
        "common/methods/selecting.py",
        (("min(first, 2 * plan.second_clip_norm)", "min(first, plan.second_clip_norm)"),),
        f"{_SELECTING}::test_one_record_can_turn_the_release_around_and_the_noise_is_made_for_that",
    ),
    Mutant(
        "select: no second clip",
        "client/mechanisms/selection.py",
        (("second_clip(mean[chosen], plan.second_clip_norm)", "mean[chosen]"),),
        f"{_SELECTING}::test_one_record_can_turn_the_release_around_and_the_noise_is_made_for_that",
    ),
    Mutant(
        "select: a choice costs nothing",
        "common/methods/selecting.py",
        (("plan.steps, rho, selecting_steps=selecting)", "plan.steps)"),),
        f"{_SELECTING}::test_charges_are_those_of_the_mechanisms",
    ),
    Mutant(
        "select: Gumbel noise / 2",
        "client/selection.py",
        (("+ gumbel(randomness, mean.size)", "+ gumbel(randomness, mean.size) / 2"),),
        "tests/client/test_selection.py::test_one_shot_gumbel_has_the_distribution_of_peeling",
    ),
    Mutant(
        "select: one answer more than is paid for",
        "client/selection.py",
        (("laplace(randomness, picks)", "laplace(randomness, picks + 1)"),),
        "tests/client/test_selection.py::test_sparse_vector_finds_what_passes_and_stops_when_paid_for",
    ),
    Mutant(
        "compressive: the published sensitivity",
        "common/compressive.py",
        (("return self.column_bound() / epsilon", "return math.sqrt(self.rows) / epsilon"),),
        f"{_PUBLISHED}::test_sqrt_p_is_not_the_sensitivity_of_a_drawn_matrix",
    ),
    Mutant(
        "compressive: entries not clipped",
        "client/mechanisms/compressive.py",
        (("np.clip(finite[chosen], -entry_bound, entry_bound)", "finite[chosen]"),),
        f"{_PUBLISHED}::test_entries_beyond_the_bound_are_clipped_not_assumed_away",
    ),
    Mutant(
        "compressive: noise / 3",
        "client/mechanisms/compressive.py",
        (("measurement.noise_scale(epsilon) * laplace", "measurement.noise_scale(epsilon) / 3 * laplace"),),
        "tests/privacy/test_audit.py::test_a_third_of_the_noise_of_any_method_is_noticed[compressive]",
    ),
    Mutant(
        "select: no clip of a record",
        "client/mechanisms/selection.py",
        (("clipped_sum(model, None, plan, data)", "__import__('client.dpsgd').dpsgd.PlainSum(model, None, plan)"),),
        f"{_METHODS}::test_sensitivity[1000.0-select-exponential]",
    ),
    Mutant(
        "client: noise divided by the cohort before it is added",
        "server/aggregate.py",
        (("total += noise_std *", "total += noise_std / cohort *"),),
        f"{_CLIENT}::test_the_server_adds_the_promised_noise_even_to_an_empty_round",
    ),
    Mutant(
        "client: cohorts of a fixed size",
        "server/federation.py",
        (("in randomness.poisson_sample(len(members), rate)]", "in range(round(rate * len(members)))]"),),
        f"{_CLIENT}::test_cohorts_are_drawn_independently_and_in_secret",
    ),
    Mutant(
        "posterior: no clip",
        "client/mechanisms/posterior.py",
        (("dpsgd.clipped_sum(model, None, plan, data)", "dpsgd.PlainSum(model, None, plan)"),),
        f"{_METHODS}::test_sensitivity[1000.0-posterior]",
    ),
    Mutant(
        "importance: no clip",
        "client/mechanisms/importance.py",
        (("norms[finite].clamp(min=plan.clip_norm)", "torch.full_like(norms[finite], plan.clip_norm)"),),
        f"{_METHODS}::test_sensitivity[1000.0-importance]",
    ),
    Mutant(
        "importance: clip before standardising",
        "client/mechanisms/importance.py",
        (("norms = vectors.norm(dim=1)", "norms = masked.norm(dim=1)"),),
        "tests/methods/test_importance.py::test_standardised_gradients_are_clipped_after_they_are_standardised",
    ),
    Mutant(
        "importance: no noise",
        "client/mechanisms/importance.py",
        (("gradient_sum, adds_noise=True,", "gradient_sum, adds_noise=False,"),),
        f"{_METHODS}::test_noise_on_what_is_kept[importance]",
    ),
    Mutant(
        "charged for one step of a round",
        "common/methods/method.py",
        (("plan.sampling_rate, plan.steps)", "plan.sampling_rate, 1)"),),
        "tests/common/test_plan.py::test_mechanism_and_charge_come_from_the_same_numbers",
    ),
    Mutant(
        "match-noise: steps raised, noise not",
        "common/methods/match_noise.py",
        (("noise_multiplier / math.sqrt(density)", "noise_multiplier"),),
        "tests/methods/test_masks_and_noise.py::test_matched_noise_has_the_norm_of_dense_noise_and_is_spent_on_steps",
    ),
    Mutant(
        "amplified as if sampling hid more",
        "common/renyi.py",
        (("logs = binomials +", "logs = binomials - math.log(3) +"),),
        f"{_RENYI}::test_no_mechanism_with_a_curve_passes_its_bound",
    ),
    Mutant(
        "amplified as if a record that is removed left nothing behind",
        "common/renyi.py",
        (("flat + sampling_rate**3 * at_order", "flat"),),
        f"{_RENYI}::test_no_mechanism_with_a_curve_passes_its_bound",
    ),
    Mutant(
        "plan: a clip norm that single precision cannot carry",
        "common/plan.py",
        (('"clip_norm": Range(1e-6, 1e9)', '"clip_norm": Range(1e-6, 1e300)'),),
        "tests/common/test_plan.py::test_every_number_has_a_range_that_single_precision_carries[clip_norm]",
    ),
    Mutant(
        "plan: any unit with any method",
        "common/plan.py",
        (("check(self.privacy_unit in units,", "check(True,"),),
        "tests/common/test_plan.py::test_a_plan_is_charged_by_the_unit_that_its_method_protects[select-random]",
    ),
    Mutant(
        "a failure after the charge told to the server",
        "client/site.py",
        (("raise NoRelease from None", "raise"),),
        f"{_ENFORCEMENT}::{_FAILURE}",
    ),
    Mutant(
        "a round that failed after its charge trained again",
        "client/site.py",
        (("self._failed.add(entry.number)", "pass"),),
        f"{_ENFORCEMENT}::{_FAILURE}",
    ),
    Mutant(
        "self-check after the charge",
        "client/site.py",
        (('if plan.private and plan.privacy_unit == "record":', "if False:"),),
        f"{_ENFORCEMENT}::test_a_model_that_mixes_records_is_refused_before_the_charge",
    ),
    Mutant(
        "self-check that cannot conclude passed",
        "client/clipping/self_check.py",
        (("    if not agreed:", "    if False:"),),
        f"{_REFUSED}[Bounded-vectors-cannot be checked before it is trained: .* no gradient]",
    ),
    Mutant(
        "self-check at the parameters that a server chose",
        "client/clipping/self_check.py",
        (("for made_up in _made_up_parameters(own):", "for made_up in [own]:"),),
        f"{_REFUSED}[ZeroBranch-vectors-depends on the other records]",
    ),
    Mutant(
        "shared arguments guessed by their length",
        "client/clipping/any_layer.py",
        (("[first if counts else None for counts in calls[number]]", f"[{_GUESS} for t in tensors]"),),
        "tests/client/test_clipping.py::test_what_all_records_share_may_have_as_many_rows_as_the_batch",
    ),
    Mutant(
        "the real size declared",
        "simulations/site_cli.py",
        (
            (
                "    if not options.declared_size:",
                "    options.declared_size = options.declared_size or count\n    if False:",
            ),
        ),
        "tests/simulations/test_cli.py::test_the_size_that_a_site_declares_is_its_operators_choice",
    ),
    Mutant(
        "channels last, whether the model takes them or not",
        "common/models.py",
        (("return channels_last(inputs) if self._channels_last[shape] else inputs", "return channels_last(inputs)"),),
        f"{_NETWORKS}[QuickStart-tests.simulations.test_models_and_data:small_photographs]",
    ),
    Mutant(
        "grey pictures without a channel",
        "common/datasets.py",
        (("if inputs.dtype == np.uint8 and inputs.ndim == 3:", "if False:"),),
        f"{_NETWORKS}[one_convolution-fashion-mnist-12k]",
    ),
    Mutant(
        "a result with an epsilon of a run that learnt nothing",
        "server/app.py",
        (("        _require_learning(state, folder)\n", ""),),
        "tests/simulations/test_run.py::test_a_run_that_every_site_fails_in_has_no_result[record]",
    ),
    Mutant(
        "client: a result of a run that learnt nothing",
        "server/app.py",
        (("if state.model_version and any(", "if state.model_version or any("),),
        "tests/simulations/test_run.py::test_a_run_that_every_site_fails_in_has_no_result[client]",
    ),
    Mutant(
        "linear attack: a bound without the chance that an equation is kept",
        "simulations/attacks/linear.py",
        (("return share * noise**2 * size /", "return noise**2 * size /"),),
        f"{_CLAIMS}::test_the_bound_of_the_linear_attack_holds_for_every_mask_size",
    ),
    Mutant(
        "linear attack: equations kept independently of each other",
        "simulations/attacks/linear.py",
        (("lost *= max(size - kept - number, 0) / (size - number)", "lost *= 1 - kept / size"),),
        f"{_CLAIMS}::test_the_bound_of_the_linear_attack_holds_for_every_mask_size",
    ),
    Mutant(
        "suggest: the sites' momentum in a rule for the server's",
        "simulations/suggest.py",
        (
            (
                'momentum = config.server_momentum if config.server_optimizer == "momentum" else 0.0',
                "momentum = config.client_momentum",
            ),
        ),
        "tests/simulations/test_methods_page.py::test_suggest_says_what_it_assumes_and_runs_nothing",
    ),
    Mutant(
        "server momentum: a velocity that dies with its mask",
        "server/aggregate.py",
        (
            (
                '                state["velocity"][kept] = velocity\n',
                '                state["velocity"][:] = 0\n                state["velocity"][kept] = velocity\n',
            ),
        ),
        "tests/simulations/test_methods_page.py::test_partners_have_the_same_noise",
    ),
    Mutant(
        "select: the published sensitivity in the paper's budget",
        "client/selection.py",
        (("return min(record_bound, 2 * norm)", "return min(record_bound, norm)"),),
        f"{_CLAIMS}::test_the_papers_noise_multiplier_costs_another_budget_than_its_table_says",
    ),
    Mutant(
        "Table 2: a headline without what tuning leaves of it",
        "README.md",
        (("at which both do better, it is 0.56", "at which both do better, it is 1.50"),),
        f"{_CLAIMS}::test_the_gain_of_table_2_is_stated_with_what_is_left_of_it_where_both_are_tuned",
    ),
    Mutant(
        "figure 2: as in the paper where noise times clip norm is 1",
        "docs/experiments.md",
        (("1.2 to 1.4 points", "1.0 to 1.4 points"),),
        f"{_CLAIMS}::test_where_noise_times_clip_norm_is_one_masks_cost_accuracy",
    ),
    Mutant(
        "compressive: another noise energy of keeping all",
        "docs/experiments.md",
        (("has 96 times", "has 118 times"),),
        f"{_CLAIMS}::test_keeping_all_entries_has_96_times_the_noise_energy_of_plain_laplace_noise",
    ),
    Mutant(
        "--ray-address alone ignored",
        "simulations/ray_grid.py",
        ((_ASKED, 'asked = (address and os.environ.get("RAY_ADDRESS")) or "local"'),),
        _CLUSTERS,
    ),
    Mutant(
        "the environment before --ray-address",
        "simulations/ray_grid.py",
        ((_ASKED, 'asked = os.environ.get("RAY_ADDRESS") or address or "local"'),),
        _CLUSTERS,
    ),
    Mutant(
        "Ray's note of its last cluster followed",
        "simulations/ray_grid.py",
        (("ray.init(address=found,", 'ray.init(address=None if found == "local" else found,'),),
        _CLUSTERS,
    ),
    Mutant(
        "--ray-address kept from the engine",
        "simulations/run.py",
        (("ray_address=engine.ray_address", "ray_address=None"),),
        "tests/simulations/test_run.py::test_what_is_said_of_the_engine_reaches_it",
    ),
    Mutant(
        "experiments one at a time",
        "simulations/crew.py",
        (("len(running) < self.jobs", "len(running) < 1"),),
        "tests/simulations/test_many_runs.py::test_as_many_at_a_time_as_asked_for",
    ),
    Mutant(
        "epsilon 1 where nobody was charged",
        "server/privacy.py",
        (("default=0.0", "default=1.0"),),
        "tests/server/test_state.py::test_where_nobody_was_charged_epsilon_is_nothing",
    ),
    Mutant(
        "newer results opened and written",
        "simulations/experiments/results.py",
        (("if version > len(_MIGRATIONS):", "if False:"),),
        _VERSIONS,
    ),
    Mutant(
        "an update of another version parsed",
        "common/coding.py",
        (("if version != _VERSION or reserved != 0:", "if version != _VERSION and reserved != 0:"),),
        _VERSIONS,
    ),
    Mutant(
        "a model of another version parsed",
        "common/broadcast.py",
        (("magic != _MAGIC or version != _VERSION or", "magic != _MAGIC or"),),
        _VERSIONS,
    ),
    Mutant(
        "a plan of another version parsed",
        "common/plan.py",
        (('raw.pop("v", None) != _VERSION', 'raw.pop("v", None) is None'),),
        _VERSIONS,
    ),
    Mutant(
        "a newer ledger opened",
        "client/ledger.py",
        (("if version > len(_MIGRATIONS):", "if version > len(_MIGRATIONS) + 1:"),),
        _VERSIONS,
    ),
    Mutant(
        "a checkpoint of another format resumed",
        "server/checkpoint.py",
        (('if facts.pop("format") != _FORMAT:', 'if facts.pop("format") > _FORMAT:'),),
        _VERSIONS,
    ),
    Mutant(
        "waiting that nobody ends",
        "deployment/processes.py",
        (("if ended or time.monotonic() >= deadline:", "if ended:"),),
        f"{_DEPLOYMENT}/test_processes.py::TestWaiting::test_it_ends_in_time_with_the_end_of_the_log",
    ),
    Mutant(
        "waiting for a process that has ended",
        "deployment/processes.py",
        (("ended = process.starts > starts or not process.runs", "ended = False"),),
        f"{_DEPLOYMENT}/test_processes.py::TestWaiting::test_it_ends_when_the_process_does",
    ),
    Mutant(
        "a stranger's server taken for the gate",
        "deployment/processes.py",
        (("verify=trust, trust_env=False", "verify=False, trust_env=False"),),
        f"{_DEPLOYMENT}/test_processes.py::TestPorts::test_the_gate_answers_once_it_has_found_the_superlink_and_nobody_in_its_place",
    ),
    Mutant(
        "a stranger's server taken for the SuperLink",
        "deployment/superlink.py",
        (("kind = DeploymentError if wrong_ca else LinkUnreachable", "kind = LinkUnreachable"),),
        f"{_DEPLOYMENT}/test_processes.py::TestPorts::test_a_strangers_server_is_not_taken_for_ours",
    ),
    Mutant(
        "a lost ServerApp begun anew",
        "deployment/superlink.py",
        (('again = {"restart": True}', "again = {}"),),
        f"{_DEPLOYMENT}/test_superlink.py::test_a_run_that_lost_its_server_app_is_submitted_again_with_restart",
    ),
    Mutant(
        "a warm helper that dies unnoticed",
        "deployment/warm_node.py",
        (("signal.signal(signal.SIGINT, signal.SIG_IGN)", "signal.signal(signal.SIG_IGN, signal.SIGINT)"),),
        f"{_DEPLOYMENT}/test_warm_node.py::test_the_helper_serves_and_the_slow_way_is_not_gone",
    ),
    Mutant(
        "a gate that buffers whole replies",
        "deployment/gate.py",
        (("client.send(asked, stream=True)", "client.send(asked)"),),
        f"{_DEPLOYMENT}/test_gate.py::test_an_answer_is_handed_on_as_it_comes",
    ),
    Mutant(
        "cookies shared at the gate",
        "deployment/gate.py",
        ((", cookies=no_cookies", ""),),
        f"{_DEPLOYMENT}/test_gate.py::test_flowers_own_headers_and_those_of_the_body_are_handed_on_and_no_others",
    ),
    Mutant(
        "the logs of any run",
        "deployment/cli.py",
        (("run_id = runs[0].run_id", "run_id = runs[-1].run_id"),),
        f"{_DEPLOYMENT}/test_cli.py::test_logs_are_of_the_run_that_is_named_or_of_the_latest",
    ),
    Mutant(
        "self-check on tokens and classes that are all alike",
        "client/clipping/self_check.py",
        (("for below in (2, 1):", "for below in (1,):"),),
        "tests/client/test_clipping.py::test_what_a_sites_made_up_records_show",
    ),
    Mutant(
        "self-check that looks past buffers",
        "client/clipping/self_check.py",
        (("_require_untouched_buffers(model, records[0])", "pass"),),
        "tests/client/test_clipping.py::test_what_a_sites_made_up_records_show",
    ),
    Mutant(
        "dropout found to be drawn anew after the charge",
        "client/clipping/self_check.py",
        (("    engines = [(kept,", "    with _without_dropout(model.module):\n     engines = [(kept,"),),
        "tests/client/test_clipping.py::test_dropout_in_a_layer_that_is_redone_is_refused_by_the_check",
    ),
    Mutant(
        "channels last under strided convolutions of 1 x 1",
        "common/models.py",
        (("not self._has_shortcuts() and self._passes(made_up)", "self._passes(made_up)"),),
        "tests/common/test_models.py::test_pictures_have_their_channels_last_but_for_shortcuts",
    ),
)


class _NoShrinking:
    """A pytest plugin for Hypothesis: a mutant is dead when a case is found, whether it is a small one or not."""

    @staticmethod
    def pytest_configure() -> None:
        """Leave out what comes after finding a case."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")


def copy_project(folder: Path) -> None:
    """Copy the files that git knows, or would add, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)


def run_tests(copy: Path, arguments: Iterable[str], plugins: Iterable[Any] = ()) -> int:
    """Run tests of a copy in this process, which must be a fork, into output.txt; return pytest's code."""
    for loaded in [name for name in sys.modules if name.partition(".")[0] in _FOLDERS]:
        del sys.modules[loaded]  # the project's own, not the copy's
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != PROJECT)]
    os.environ["PYTHONPATH"] = str(copy)
    os.chdir(copy)
    with (copy / "output.txt").open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    always = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(copy)]
    code = int(pytest.main([*always, *arguments], plugins=[_NoShrinking(), *plugins]))
    sys.stdout.flush()
    return code


def _killed(number: int) -> bool:
    """Tell whether the test of a mutant fails in a copy of the project that is broken in its way."""
    mutant = MUTANTS[number]
    code, output = _tested((mutant.killer,), mutant)
    if code not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest could not run {mutant.killer}\n{output[-2000:]}")
    return code == 1


def _broken(mutant: Mutant, folder: Path) -> str:
    """Return the text of the mutant's file with its changes."""
    text = (folder / mutant.file).read_text(encoding="utf-8")
    for before, after in mutant.changes:
        if before not in text:
            sys.exit(f"{mutant.name}: {mutant.file} has no {before!r} any more; change the mutant with the code")
        text = text.replace(before, after)
    return text


def _tested(tests: tuple[str, ...], mutant: Mutant | None = None) -> tuple[int, str]:
    """Run tests in a copy of the project, in this process, which must be a fork; return pytest's code and output."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_project(folder)
        if mutant is not None:
            (folder / mutant.file).write_text(_broken(mutant, folder), encoding="utf-8")
        code = run_tests(folder, tests)
        return code, (folder / "output.txt").read_text(errors="replace")


def main() -> int:
    """Try every mutant and end with the BAR line; 1 if one survives."""
    for mutant in MUTANTS:
        _broken(mutant, PROJECT)  # one that cannot be made any more shows before hours of others
    killers = sorted({mutant.killer for mutant in MUTANTS})
    survivors = 0
    # What takes long to import is imported once, above, and every copy is tested in a fork of its own.
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as forks:
        for killer, (code, output) in zip(killers, forks.imap(_tested, [(name,) for name in killers]), strict=True):
            if code:
                sys.exit(f"{killer} fails before anything is broken:\n{output[-2000:]}")
        print(f"{len(killers)} tests pass before anything is broken", flush=True)
        for mutant, dead in zip(MUTANTS, forks.imap(_killed, range(len(MUTANTS))), strict=True):
            survivors += not dead
            print(f"{'killed' if dead else 'SURVIVED':8}  {mutant.name:60}  {mutant.killer}", flush=True)
    print(f"BAR mutants={len(MUTANTS)} killed={len(MUTANTS) - survivors}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
