//! Element types and reduction operators, with the codes that cross the wire and the Python border.

use crate::error::{Error, Result};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// `torch.float32`
    F32 = 0,
    /// `torch.float64`
    F64 = 1,
    /// `torch.float16`
    F16 = 2,
    /// `torch.bfloat16`
    BF16 = 3,
    /// `torch.int8`
    I8 = 4,
    /// `torch.uint8`
    U8 = 5,
    /// `torch.int32`
    I32 = 6,
    /// `torch.int64`
    I64 = 7,
    /// `torch.bool`, one byte, 0 or 1
    Bool = 8,
    /// `torch.int16`
    I16 = 9,
    /// `torch.complex64`, summed as two `float32`
    C64 = 10,
    /// `torch.complex128`, summed as two `float64`
    C128 = 11,
    /// `torch.float8_e4m3fn`, which only moves
    F8E4M3 = 12,
    /// `torch.float8_e5m2`, which only moves
    F8E5M2 = 13,
    /// `torch.float8_e4m3fnuz`, which only moves
    F8E4M3Fnuz = 14,
    /// `torch.float8_e5m2fnuz`, which only moves
    F8E5M2Fnuz = 15,
}

impl DType {
    /// Every type, in the order of the codes.
    pub const ALL: [DType; 16] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I8,
        DType::U8,
        DType::I32,
        DType::I64,
        DType::Bool,
        DType::I16,
        DType::C64,
        DType::C128,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::F8E4M3Fnuz,
        DType::F8E5M2Fnuz,
    ];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::C128 => 16,
            DType::F64 | DType::I64 | DType::C64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 | DType::I16 => 2,
            DType::I8 | DType::U8 | DType::Bool => 1,
            DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => 1,
        }
    }

    /// What addresses of elements are multiples of.
    pub const fn align(self) -> usize {
        if self.is_complex() { self.size() / 2 } else { self.size() }
    }

    /// torch's name of the type.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::F64 => "float64",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::I8 => "int8",
            DType::U8 => "uint8",
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::Bool => "bool",
            DType::I16 => "int16",
            DType::C64 => "complex64",
            DType::C128 => "complex128",
            DType::F8E4M3 => "float8_e4m3fn",
            DType::F8E5M2 => "float8_e5m2",
            DType::F8E4M3Fnuz => "float8_e4m3fnuz",
            DType::F8E5M2Fnuz => "float8_e5m2fnuz",
        }
    }

    /// The type of a code.
    pub fn from_code(code: u8) -> Result<Self> {
        Self::ALL
            .get(code as usize)
            .copied()
            .ok_or_else(|| Error::misuse(format!("{code} is not the code of a dtype")))
    }

    /// Sixteen-bit floats: their sums are accumulated in `f32` (invariant NUM-3).
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// Eight-bit floats: they can be sent, not reduced.
    pub const fn is_fp8(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz)
    }

    /// Pairs of floats.
    pub const fn is_complex(self) -> bool {
        matches!(self, DType::C64 | DType::C128)
    }

    const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }
}

/// How contributions are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum; integers wrap, and of bools it is whether any is true.
    Sum = 0,
    /// Sum divided by the number of ranks, rounded once.
    Avg = 1,
    /// Minimum; NaN wins.
    Min = 2,
    /// Maximum; NaN wins.
    Max = 3,
    /// Product; integers wrap, and of bools it is whether all are true.
    Prod = 4,
    /// Bitwise and; logical for bool.
    Band = 5,
    /// Bitwise or; logical for bool.
    Bor = 6,
    /// Bitwise exclusive or; logical for bool.
    Bxor = 7,
}

impl ReduceOp {
    /// Every operator, in the order of the codes.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Prod,
        ReduceOp::Band,
        ReduceOp::Bor,
        ReduceOp::Bxor,
    ];

    /// The name users type.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Prod => "prod",
            ReduceOp::Band => "band",
            ReduceOp::Bor => "bor",
            ReduceOp::Bxor => "bxor",
        }
    }

    /// The operator of a code.
    pub fn from_code(code: u8) -> Result<Self> {
        Self::ALL
            .get(code as usize)
            .copied()
            .ok_or_else(|| Error::misuse(format!("{code} is not the code of a reduce op")))
    }

    /// Refuses what makes no sense: bits of floats, an average of integers, an order of complex numbers, any reduction of
    /// eight-bit floats.
    pub fn check(self, dtype: DType) -> Result<()> {
        let fits = match self {
            _ if dtype.is_fp8() => false,
            ReduceOp::Sum => true,
            ReduceOp::Avg => dtype.is_float() || dtype.is_complex(),
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::Max => !dtype.is_complex(),
            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => !dtype.is_float() && !dtype.is_complex(),
        };
        if fits {
            return Ok(());
        }
        let hint = match self {
            _ if dtype.is_fp8() => {
                "eight-bit floats can be sent and gathered; cast to a wider float to reduce them"
            }
            ReduceOp::Avg => "use sum and divide, or cast to a float",
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::Max => "complex numbers can be summed and averaged",
            _ => "bitwise operators take integers and bool",
        };
        Err(Error::Unsupported(format!("op {} does not work on {}: {hint}", self.name(), dtype.name())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype as u8), Ok(dtype));
        }
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op as u8), Ok(op));
        }
        assert!(DType::from_code(16).is_err());
        assert!(ReduceOp::from_code(8).is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(ReduceOp::Bor.check(DType::F32).is_err());
        assert!(ReduceOp::Avg.check(DType::I32).is_err());
        assert!(ReduceOp::Max.check(DType::C64).is_err());
        assert!(ReduceOp::Bxor.check(DType::C128).is_err());
        assert!(ReduceOp::ALL.iter().all(|op| op.check(DType::F8E5M2).is_err()));
        assert!(ReduceOp::Avg.check(DType::C64).is_ok());
        assert!(ReduceOp::Max.check(DType::Bool).is_ok());
    }
}
