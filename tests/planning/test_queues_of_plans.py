"""What plans say of queues, of ranks and of the requests that they are judged by, against what is simulated."""

import disagg_sim as ds
from disagg_sim.planning.choices import prompts_of_ranks


def test_ranks_of_a_pass_wait_for_the_longest_prompt():
    """Of two prompts of a pass the longer counts: a pool that is sized for even ranks has a queue without end."""
    chat, same = ds.lengths("log_normal_4096_512"), ds.lengths(4096, 512)
    at, wide = ds.setup("llama_4_maverick", "gb200_nvl72", "fp8"), ds.Mapping(dp_attn=4, ep=4)
    even, own = (ds.prefill_grid(at, wide, law, batch=[4]).request_rate[0, 0] for law in (chat, prompts_of_ranks(chat)))
    assert own < 0.7 * even
    assert prompts_of_ranks(same).rank_loads is None
    said = ds.lengths("log_normal_4096_512", rank_imbalance="random")
    assert prompts_of_ranks(said) is said
