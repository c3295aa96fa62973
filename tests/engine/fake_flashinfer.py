"""FlashInfer's wrappers for paged attention in plain torch, for machines without a GPU.

Parameters are those of FlashInfer 0.7.2, in its order and with its defaults, without those that Baton has no use for;
`test_fake_flashinfer.py` compares them where the package is installed. `run` reads what the real kernels read: if a
wrapper was made for recorded graphs, the caller's fixed memory, as far as the last plan filled it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch


class _Wrapper:
    # Offsets, block ids, tokens in last blocks, and of prompts the offsets of their tokens.
    fixed: tuple[torch.Tensor, ...] | None = None

    def _begin(self, workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert kv_layout == "HND"
        assert backend in ("auto", "fa2", "fa3")
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "it must be zero when it is used first"

    def _keep(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sizes: tuple[int, int, int, int],
        *,
        qo_indptr: torch.Tensor | None = None,
        causal: bool = True,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        dtypes: tuple[object, object],
    ) -> None:
        """Checks a plan as the real one does, and more: whatever follows from the documentation of a parameter."""
        num_heads, num_kv_heads, head_dim, page_size = sizes
        assert num_heads % num_kv_heads == 0
        assert {each.dtype for each in (indptr, indices, last_page_len)} == {torch.int32}
        assert {each.ndim for each in (indptr, indices, last_page_len)} == {1}
        assert indptr.device.type == last_page_len.device.type == "cpu", "it would be copied to the host"
        counts = indptr.diff()
        assert indptr[0] == 0
        assert indptr[-1] == len(indices)
        assert len(counts) == len(last_page_len)
        assert (counts > 0)[slice(None) if qo_indptr is None else qo_indptr.diff() > 0].all()
        assert ((last_page_len > 0) & (last_page_len <= page_size)).all()
        assert window_left >= -1
        assert causal or window_left == -1, "a window ends with the last token of what is given"
        self._causal = causal
        if self.fixed is not None:
            fixed_indptr, fixed_indices, fixed_last = self.fixed[:3]
            assert len(indices) <= len(fixed_indices)
            fixed_indptr.copy_(indptr)
            fixed_indices[: len(indices)].copy_(indices)
            fixed_last.copy_(last_page_len)
        self._tables = self.fixed[:3] if self.fixed is not None else (indptr, indices, last_page_len)
        self._sizes, self._dtypes = sizes, dtypes
        self._window_left, self._soft_cap = window_left, logits_soft_cap or 0.0
        self._scale = head_dim**-0.5 if sm_scale is None else sm_scale

    def _run(self, q: torch.Tensor, cache: torch.Tensor, qo_indptr: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Results, and log-sum-exps to base 2; NaN for tokens of which the plan does not know."""
        num_heads, num_kv_heads, head_dim, page_size = self._sizes
        assert self._dtypes == (q.dtype, cache.dtype)
        assert q.shape[1:] == (num_heads, head_dim)
        assert qo_indptr[-1] <= len(q)
        assert cache.shape[1:] == (2, num_kv_heads, page_size, head_dim)
        assert q.stride(-1) == cache.stride(-1) == 1
        # As the kernels read them, which is no wait of the host's, whatever a test's tensors say.
        indptr, indices, last_page_len = (each.as_subclass(torch.Tensor).tolist() for each in self._tables)
        out, lse = torch.full(q.shape, float("nan"), dtype=q.dtype), torch.full(q.shape[:2], float("nan"))
        for i, last in enumerate(last_page_len):
            if qo_indptr[i] == qo_indptr[i + 1]:
                continue
            pages = cache[indices[indptr[i] : indptr[i + 1]]]
            length = (len(pages) - 1) * page_size + last
            heads = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            keys, values = heads.repeat_interleave(num_heads // num_kv_heads, dim=1).float()
            queries = q[qo_indptr[i] : qo_indptr[i + 1]].transpose(0, 1).float()
            scores = queries @ keys.transpose(1, 2) * self._scale
            if self._soft_cap:
                scores = torch.tanh(scores / self._soft_cap) * self._soft_cap
            before = length - queries.shape[1]
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(before + 1 if self._causal else length)
            if self._window_left >= 0:
                hidden |= torch.ones(scores.shape[1:], dtype=torch.bool).tril(before - self._window_left - 1)
            scores = scores.masked_fill(hidden, float("-inf"))
            attended = scores.softmax(-1) @ values
            out[qo_indptr[i] : qo_indptr[i + 1]] = attended.transpose(0, 1).to(q.dtype)
            lse[qo_indptr[i] : qo_indptr[i + 1]] = scores.logsumexp(-1).T / math.log(2)
        return out, lse


class FakeDecodeWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout, backend)
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.fixed = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        assert self.fixed is None or len(last_page_len) == len(self.fixed[2]), "a graph's batch size is fixed"
        self._keep(
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type),
        )

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, return_lse: bool = False) -> object:
        assert len(q) == len(self._tables[2])
        both = self._run(q, paged_kv_cache, list(range(len(q) + 1)))
        return both if return_lse else both[0]


class FakePrefillWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout, backend)
        self._most_rows: int | None = None  # of a recorded graph: those of the first plan
        if use_cuda_graph:
            assert backend == "fa2", "others do not divide a long prefix among the device"
            assert qo_indptr_buf is not None
            assert paged_kv_indptr_buf is not None
            assert paged_kv_indices_buf is not None
            assert paged_kv_last_page_len_buf is not None
            assert len(qo_indptr_buf) == len(paged_kv_indptr_buf) == len(paged_kv_last_page_len_buf) + 1
            self.fixed = paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf, qo_indptr_buf

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        assert qo_indptr.dtype == torch.int32
        assert qo_indptr.device.type == "cpu"
        assert len(qo_indptr) == len(paged_kv_indptr)
        assert qo_indptr[0] == 0
        assert (qo_indptr.diff() >= 0).all()
        self._rows = qo_indptr
        if self.fixed is not None:
            num_rows = int(qo_indptr[-1])
            self._most_rows = self._most_rows or num_rows
            assert num_rows <= self._most_rows
            assert len(qo_indptr) == len(self.fixed[3]), "a graph's number of prompts is fixed"
            self.fixed[3].copy_(qo_indptr)
            self._rows = self.fixed[3]
        self._keep(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            qo_indptr=qo_indptr,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type),
        )

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, return_lse: bool = False) -> object:
        rows: list[int] = self._rows.as_subclass(torch.Tensor).tolist()
        # A replayed graph has fewer rows than it was recorded with, and its kernels leave the others alone.
        assert len(q) == (self._most_rows or rows[-1])
        both = self._run(q, paged_kv_cache, rows)
        return both if return_lse else both[0]


def fake_merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    assert v.shape == v_other.shape
    assert s.shape == s_other.shape == v.shape[:2]
    assert s.dtype == s_other.dtype == torch.float32
    assert all(each.is_contiguous() for each in (v, s, v_other, s_other))
    both = torch.logaddexp2(s, s_other)
    merged = v.float() * (s - both).exp2()[..., None] + v_other.float() * (s_other - both).exp2()[..., None]
    if mask is not None:
        assert mask.shape == v.shape[:1]
        assert mask.dtype == torch.bool
        merged, both = torch.where(mask[:, None, None], merged, v.float()), torch.where(mask[:, None], both, s)
    v.copy_(merged)
    s.copy_(both)


@dataclass
class FakeMetadata:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> FakeMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class FakeLatentWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert backend == "fa2"

    def plan(
        self,
        *,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        metadata: FakeMetadata | None = None,
    ) -> None:
        assert causal
        assert isinstance(metadata, FakeMetadata)
        assert num_heads
        assert head_dim_ckv
        assert head_dim_kpe
        assert page_size
        assert sm_scale
        on_host = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_len_arr)
        assert {each.dtype for each in (*on_host, metadata.kv_indices)} == {torch.int32}
        assert {each.device.type for each in on_host} == {"cpu"}
        num_pages = metadata.kv_indptr.diff()
        assert metadata.qo_indptr[0] == metadata.kv_indptr[0] == 0
        assert metadata.kv_indptr[-1] == len(metadata.kv_indices)
        assert len(metadata.qo_indptr) == len(metadata.kv_indptr) == len(metadata.kv_len_arr) + 1
        assert torch.equal(num_pages, -(-metadata.kv_len_arr // page_size))
        assert (metadata.qo_indptr.diff() <= metadata.kv_len_arr).all()
        self._metadata, self._scale = metadata, sm_scale
        self._sizes = num_heads, head_dim_ckv, head_dim_ckv + head_dim_kpe
        self._page_size, self._dtypes = page_size, (q_data_type, kv_data_type)

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        num_heads, latent_dim, head_dim = self._sizes
        asked = self._metadata
        ends, pages, indices, lengths = (
            each.as_subclass(torch.Tensor).tolist()
            for each in (asked.qo_indptr, asked.kv_indptr, asked.kv_indices, asked.kv_len_arr)
        )
        assert self._dtypes == (query.dtype, kv_cache.dtype)
        assert query.shape == (ends[-1], num_heads, head_dim)
        assert kv_cache.shape[1:] == (self._page_size, head_dim)
        out = torch.empty((ends[-1], num_heads, latent_dim), dtype=query.dtype)
        for i, length in enumerate(lengths):
            rows = kv_cache[indices[pages[i] : pages[i + 1]]].flatten(0, 1)[:length].float()
            scores = torch.einsum("qhd,cd->hqc", query[ends[i] : ends[i + 1]].float(), rows) * self._scale
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - scores.shape[1] + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[ends[i] : ends[i + 1]] = torch.einsum("hqc,cd->qhd", weights, rows[:, :latent_dim]).to(query.dtype)
        return out


LATENT = {"BatchMLAPagedAttentionWrapper": FakeLatentWrapper, "MLAPlanMetadata": FakeMetadata}
WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": FakeDecodeWrapper,
    "BatchPrefillWithPagedKVCacheWrapper": FakePrefillWrapper,
}


def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import flashinfer` gives these wrappers. They need no workspace, so tests have a small one."""
    for module in ("flashinfer", "flashinfer_latent"):
        monkeypatch.setattr(f"engine.attention.{module}.WORKSPACE_BYTES", 1 << 16)
    fake = ModuleType("flashinfer")
    vars(fake).update(WRAPPERS, merge_state_in_place=fake_merge_state_in_place, mla=SimpleNamespace(**LATENT))
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
