//! NCCL's network plugin over several TCP streams: for users of plain NCCL, DDP or FSDP.
//!
//! ```sh
//! export NCCL_NET_PLUGIN=/path/to/libnccl-net-trigram.so NCCL_NET=Trigram
//! ```
//!
//! Each of NCCL's connections is some TCP streams. Messages are cut into chunks, and whichever stream can take
//! more takes the next chunk of the oldest message. There are no threads: sockets do not block, and everything
//! moves inside of NCCL's calls, on NCCL's own proxy thread. Memory is the host's.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `TRIGRAM_NET_STREAMS` | streams per connection, 1 to 16; the sender's setting counts | 2 |
//! | `TRIGRAM_NET_CHUNK` | bytes per chunk, like `512K` or `1M`; kept within 4K and 64M | 512K |
//! | `TRIGRAM_NET_TIMEOUT` | seconds after which a silent peer is taken for dead, 1 to 3600 | 20 |
//! | `TRIGRAM_IFACE` | the interface or address to use | |
//! | `NCCL_SOCKET_IFNAME` | the interfaces to use, as NCCL reads it, where `TRIGRAM_IFACE` is not set | |
//!
//! # Layout
//!
//! * [`exports`] — NCCL's tables of functions, one file per version; [`abi`] — the structures they use.
//! * `device` — the interfaces; `settings` — the variables; `log` — NCCL's logger.
//! * `handle` — how a peer is told where to connect; `hello` — what a stream says first; `token` — random bytes.
//! * `listen`, `connect` — how connections come to be.
//! * `send`, `recv` — a connection's two ends; `stream` — one TCP stream of each; `chunk` — what precedes each
//!   chunk, and which bytes of a message are still to come; `ring` — the messages under way.
//! * `socket` — options of sockets; `liveness` — whether a silent peer is alive.
//! * `request` — what NCCL holds: connections and requests; `region` — the caller's memory.
//!
//! Unsafe code is in `exports` and `request` (NCCL's pointers), `region` (NCCL's buffers), `log` (a C function),
//! `token` and `liveness` (a system call each).

#![warn(clippy::undocumented_unsafe_blocks)]

pub mod abi;
mod chunk;
mod connect;
mod device;
mod error;
pub mod exports;
mod handle;
mod hello;
#[cfg(test)]
mod hostile;
mod listen;
mod liveness;
mod log;
mod recv;
mod region;
mod request;
mod ring;
mod send;
mod settings;
mod socket;
mod stream;
mod token;
