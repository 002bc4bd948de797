"""The policies that come with Outpace, one file per family."""

from collections.abc import Mapping

from outpace.inject.policies import (
    bert,
    bloom,
    cohere,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gptj,
    granite,
    llama,
    moe,
    mpt,
    opt,
    phi,
    phi3,
    stablelm,
    starcoder2,
)
from outpace.inject.policy import Policy

POLICIES: tuple[Policy, ...] = (
    *bert.POLICIES,
    *cohere.POLICIES,
    *gemma.POLICIES,
    *granite.POLICIES,
    *llama.POLICIES,
    *moe.POLICIES,
    *mpt.POLICIES,
    *phi3.POLICIES,
    *starcoder2.POLICIES,
    *bloom.POLICIES,
    *falcon.POLICIES,
    *gpt2.POLICIES,
    *gpt_neox.POLICIES,
    *gptj.POLICIES,
    *opt.POLICIES,
    *phi.POLICIES,
    *stablelm.POLICIES,
)


def by_class(policies: tuple[Policy, ...] = POLICIES) -> Mapping[str, Policy]:
    """Policies by the class name of the layers they are for."""
    return {name: policy for policy in policies for name in policy.layers}
