"""The kernel behind `faults`: in a file of its own, since Triton is there on GPU machines only."""

import triton
import triton.language as tl


# Triton reads the function's source: a type that is no Triton type, even Any, does not compile
@triton.jit(do_not_specialize=["address"])  # type: ignore[untyped-decorator]
def store(address) -> None:  # type: ignore[no-untyped-def]
    tl.store(address.to(tl.int64).to(tl.pointer_type(tl.int64)), 1)
