// A stand-in for NCCL and CUDA's driver on a machine that has no GPU: "device memory" is the
// process's own, streams are threads, and ranks (threads or processes) meet in shared memory.
//
// It is for testing what calls NCCL: that calls come in a right order with right arguments, that
// nothing is used before it is ready, that errors and aborts get through. It is strict where NCCL is
// lenient. It says nothing about speed, and does not replace a run on a GPU.
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { OK = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7, RANKS = 8 };

struct stream;
typedef void (*work_fn)(void *);

// Gives work to a stream; null is the default one.
void stream_push(struct stream *stream, work_fn run, void *argument);
