#!/bin/bash
# vLLM on several nodes, joined by Ray, behind one address: an engine on each node. Run on every node by `srun`, or by
# hand with SLURM_PROCID set to 0 on the first node and to 1, 2, ... on the others.
#
#     serve_on_ray.sh FIRST_NODE NODES GPUS_OF_A_NODE MODEL
#
# A model that does not fit on one node takes one engine over several instead of one on each: replace the options of
# data parallelism by `--pipeline-parallel-size NODES --distributed-executor-backend ray`.
set -euo pipefail
first=$1 nodes=$2 gpus=$3 model=$4

if [ "$SLURM_PROCID" != 0 ]; then
    until ray start --address="$first:6379" --block; do sleep 2; done # the first node may not be there yet
    exit
fi

ray start --head --port=6379
trap 'ray stop' EXIT
until ray status | grep -F "/$((nodes * gpus)).0 GPU" > /dev/null; do sleep 1; done
VLLM_SERVER_DEV_MODE=1 vllm serve "$model" --host 0.0.0.0 --port 8000 \
    --tensor-parallel-size "$gpus" --data-parallel-size "$nodes" --data-parallel-size-local 1 --data-parallel-backend ray \
    --max-model-len 16384 --enable-scale-out --logprobs-mode processed_logprobs --max-logprobs -1 \
    --weight-transfer-config '{"backend": "nccl"}'
