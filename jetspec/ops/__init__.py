"""Operations of a model. Each file `x.py` states one contract and its plain torch reference, which is the CPU path and
the oracle of the kernels in `x_triton.py` and `x_*_gluon.py` (Hopper). `select.py` chooses between them."""

from jetspec.ops.distill_loss import CHUNK, DistillLoss, distill_loss, label_prob
from jetspec.ops.kv_write import compact_kv, compact_rows, place, store_kv
from jetspec.ops.layouts import HeadNorm, Placement, Residual, Routed, SlotRows, copied
from jetspec.ops.linear import add_linear, linear, norm_linear, norm_swiglu, pack
from jetspec.ops.moe import add_mixture, norm_route
from jetspec.ops.norm_rope import rms_norm, rope, rotate, rotate_qkv, rotate_store, rotate_store_layers, swiglu
from jetspec.ops.shortlist import apply_temperature, log_odds, shortlist, topk_logprob
from jetspec.ops.transfer import copy_to_host, note_time
from jetspec.ops.tree_attention import AttentionPlan, KernelPlan, plan_attention, tree_attention
