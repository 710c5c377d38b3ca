#!/bin/sh
# Prints one line of layouts.txt for an nccl.h: sh layouts.sh DIRECTORY_OF_NCCL_H
# CUDA's headers are not needed: the three types that NCCL's takes from them are declared here.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo 'typedef struct CUstream_st *cudaStream_t; typedef struct CUevent_st *cudaEvent_t;' > "$work/cuda_runtime.h"
echo '#define CUDART_VERSION 12000' >> "$work/cuda_runtime.h"
: > "$work/cuda_fp16.h"; : > "$work/cuda_bf16.h"; : > "$work/cuda_fp8.h"
fields=$(sed -n '/typedef struct ncclConfig/,/} ncclConfig_t;/p' "$1/nccl.h" | sed -n '/ncclConfigExt/,$!s/^ *[a-z_]*[a-z_ ]*[ *]\([A-Za-z0-9]*\);.*/\1/p')
{
    printf '%s\n' '#include <stddef.h>' '#include <stdio.h>' '#include "nccl.h"' 'int main(void) {'
    printf '%s\n' 'printf("%d.%d.%d sizeof=%zu id=%zu", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH, sizeof(ncclConfig_t), sizeof(ncclUniqueId));'
    for field in $fields; do
        printf '%s\n' "printf(\" $field=%zu\", offsetof(ncclConfig_t, $field));"
    done
    printf '%s\n' 'puts(""); return 0; }'
} > "$work/layout.c"
cc -I"$work" -I"$1" -o "$work/layout" "$work/layout.c"
"$work/layout"
