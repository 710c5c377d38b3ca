//! As much of CUDA's driver as communicators need, loaded at run time: devices, streams, events,
//! and memory for examples and tests. The runtime library (`libcudart`) is not needed.

mod buffer;
mod driver;
mod stream;

pub use buffer::{Buffer, Data, DataMut};
pub use driver::{Cuda, Device};
pub use stream::{Event, Stream};
