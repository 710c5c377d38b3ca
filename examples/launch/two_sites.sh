#!/bin/sh
# Two sites with a slow link between them: DiLoCo averages the weights every 32 steps instead of the gradients in
# every step. The link is encrypted, and ranks prove that they know the secret.
#
#   export TRIGRAM_SECRET=...                                     the same at both sites; openssl rand -hex 32
#   sh examples/launch/two_sites.sh 0 SITE0                       at the first site; SITE0 is its address
#   sh examples/launch/two_sites.sh 1 SITE0                       at the other
#
# RANKS: ranks at each site (1). PORT: the store's port at the first site (29500). Ranks also connect to each other:
# let the firewall pass all TCP between the two hosts.
set -eu
site=$1 address=$2
shift 2
: "${TRIGRAM_SECRET:?set it to the same value at both sites}"
export TRIGRAM_TLS=1 TRIGRAM_ALGORITHM="${TRIGRAM_ALGORITHM:-diloco}"
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes 2 --node-rank "$site" --nproc-per-node "${RANKS:-1}" \
    --master-addr "$address" --master-port "${PORT:-29500}" examples/train_gpt.py "$@"
