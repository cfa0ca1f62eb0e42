"""Two independent readings: where each stage's second formulation stands. A stage without one fails here."""

import importlib
import pkgutil
from pathlib import Path

from test_whole_model import READ

import reference
from reference.stage import STAGES

TESTS = Path(__file__).parent
READINGS = {  # stage: the test that holds it against a formulation of another form
    **{name: "test_whole_model.py::test_an_error_in_any_stage_is_seen" for name in READ},
    "sample": "test_sample.py::test_frequencies_follow_the_softmax",
    # Variants of the caches, speculation's state.
    "kda.recurrence_bf16": "test_cache_variants.py::test_a_bf16_state_is_rounded_once_where_it_is_stored",
    "mla.attention_fp8": "test_cache_variants.py::test_attention_reads_rounded_rows_and_queries",
    "mla.cache_write_fp8": "test_cache_variants.py::test_rows_come_back_within_half_a_unit",
    "kda.conv_verify": "test_kda_replay.py::test_convolution_continues_at_the_kept_token",
    "kda.recurrence_slots": "test_kda_replay.py::test_slots_start_where_the_kept_token_left",
    "kda.recurrence_record": "test_kda_replay.py::test_replay_equals_the_sequential_recurrence",
    "kda.commit": "test_kda_replay.py::test_replay_by_single_numbers",
    # The draft.
    **{
        f"draft.{name}": "test_draft.py::test_a_block_equals_the_dense_model"
        for name in ("add_norm", "context_proj", "down", "gate_up", "kv_a", "norm", "o_proj", "q_a", "q_b")
    },
    "draft.rotate": "test_draft.py::test_rotation_is_a_complex_product_and_sees_distances_only",
    "draft.markov": "test_draft.py::test_drafting_replays_its_noise",
    "draft.tap": "test_draft.py::test_taps_are_what_the_next_layer_adds_up",
    "verify.accept.greedy": "test_verify.py::test_greedy_in_a_loop",
    "verify.accept.standard": "test_verify.py::test_rules_keep_the_targets_distribution",
    "verify.accept.block": "test_verify.py::test_block_equals_the_published_formulas_in_loops",
    "verify.accept.synthetic": "test_verify.py::test_synthetic_lengths_have_their_mean",
    "verify.end": "test_speculate.py::test_an_end_keeps_the_distribution",
    # Ranks.
    "comm.all_reduce": "test_world.py::test_orders_and_roundings_of_a_sum",
    "comm.reduce_scatter": "test_world.py::test_slices_by_rows_are_ragged_at_the_end",
    "comm.all_gather": "test_world.py::test_slices_by_rows_are_ragged_at_the_end",
    "comm.all_gather_f32": "test_world.py::test_ranks_equal_one_device_in_float64",
    **{
        f"dcp.{name}": "test_dcp.py::test_split_attention_equals_unsplit"
        for name in ("gather_heads", "to_base_2", "weigh", "scatter_heads", "merge")
    },
    "embed.shard": "test_rank_stages.py::test_parts_of_the_embedding_add_up_without_rounding",
    "moe.own_experts": "test_rank_stages.py::test_every_choice_lies_on_one_rank",
    "moe.finalize_chain": "test_rank_stages.py::test_the_older_finalize_rounds_every_product_and_every_sum",
    "moe.latent_norm_squares": "test_rank_stages.py::test_tier_0_rounds_the_squares",
    "moe.fold": "test_rank_stages.py::test_the_fold_touches_its_own_columns",
}


def test_every_stage_has_a_second_reading():
    for module in pkgutil.iter_modules(reference.__path__):
        importlib.import_module(f"reference.{module.name}")
    ours = {name for name, stage in STAGES.items() if stage.fn and stage.fn.__module__.startswith("reference.")}
    assert ours == set(READINGS)


def test_the_readings_are_there():
    for name, place in READINGS.items():
        file, _, test = place.partition("::")
        assert f"\ndef {test}(" in (TESTS / file).read_text(), (name, place)
