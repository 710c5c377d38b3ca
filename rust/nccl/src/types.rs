//! Numbers that stand for things: types, reductions, versions, and the id that ranks meet by.

use std::ffi::c_int;
use std::fmt;

/// `ncclDataType_t`: what is in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum DataType {
    /// `i8`
    Int8 = 0,
    /// `u8`
    Uint8 = 1,
    /// `i32`
    Int32 = 2,
    /// `u32`
    Uint32 = 3,
    /// `i64`
    Int64 = 4,
    /// `u64`
    Uint64 = 5,
    /// IEEE half.
    Float16 = 6,
    /// `f32`
    Float32 = 7,
    /// `f64`
    Float64 = 8,
    /// bfloat16.
    Bfloat16 = 9,
}

impl DataType {
    /// Bytes of one.
    pub fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

/// Types that NCCL knows: any bits are a value of theirs.
///
/// # Safety
///
/// `DATA_TYPE` describes the type: the same size, and no padding.
pub unsafe trait Element: Copy + Send + 'static {
    /// As NCCL calls it.
    const DATA_TYPE: DataType;
}

macro_rules! element {
    ($($rust:ty => $nccl:ident),*) => { $(
        // SAFETY: the sizes are equal, see the test below; numbers have no padding.
        unsafe impl Element for $rust {
            const DATA_TYPE: DataType = DataType::$nccl;
        }
        const _: () = assert!(size_of::<$rust>() == match DataType::$nccl {
            DataType::Int8 | DataType::Uint8 => 1,
            DataType::Int32 | DataType::Uint32 | DataType::Float32 => 4,
            _ => 8,
        });
    )* };
}

element!(i8 => Int8, u8 => Uint8, i32 => Int32, u32 => Uint32, i64 => Int64, u64 => Uint64, f32 => Float32, f64 => Float64);

/// `ncclRedOp_t`: how values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Op(pub(crate) c_int);

impl Op {
    /// The sum.
    pub const SUM: Self = Self(0);
    /// The product.
    pub const PROD: Self = Self(1);
    /// The largest.
    pub const MAX: Self = Self(2);
    /// The smallest.
    pub const MIN: Self = Self(3);
    /// The sum divided by the number of ranks.
    pub const AVG: Self = Self(4);
}

/// What ranks meet by: made by one, given to all the others by other means.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub(crate) [u8; Self::BYTES]);

impl UniqueId {
    /// `NCCL_UNIQUE_ID_BYTES`.
    pub const BYTES: usize = 128;

    /// Its bytes, to be sent.
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// From bytes that were received.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({:02x?}..)", &self.0[..8]) // the rest is a secret between the ranks
    }
}

/// A version of NCCL, ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 2.
    pub major: u32,
    /// What changes interfaces.
    pub minor: u32,
    /// What mends them.
    pub patch: u32,
}

impl Version {
    /// From its parts.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// From what `ncclGetVersion` gives: two digits a part from 2.9 on, one for the minor before.
    pub fn from_code(code: u32) -> Self {
        let ten = if code >= 10_000 { 10 } else { 1 };
        Self { major: code / (1000 * ten), minor: code / 100 % (10 * ten), patch: code % 100 }
    }

    /// As structures carry it.
    pub fn code(self) -> u32 {
        self.major * 10_000 + self.minor * 100 + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_they_were_written_at_all_times() {
        assert_eq!(Version::from_code(22_907), Version::new(2, 29, 7));
        assert_eq!(Version::from_code(21_805).to_string(), "2.18.5");
        assert_eq!(Version::from_code(2_708), Version::new(2, 7, 8));
        assert_eq!(Version::new(2, 32, 3).code(), 23_203);
        assert!(Version::new(2, 9, 0) < Version::new(2, 18, 0));
    }
}
