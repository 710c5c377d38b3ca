//! Codecs: fewer bits for the same numbers.
//!
//! A [`Codec`] turns n floats into exactly [`Codec::size`]`(n)` bytes and back. Most work block by
//! block; such a codec is one file with two short functions ([`block::BlockCodec`]), and gets
//! error feedback, 16-bit inputs and weighted decoding from [`block::Blocks`]. The formats are
//! written down in `docs/algorithms.md`.
//!
//! What all of them hold to: the size is known before encoding; the same input gives the same
//! bytes; a value that is not finite is carried as documented, never turned into a plausible
//! number; decoding trusts nothing and ends with numbers or [`Error::Corrupt`].

pub mod affine;
pub mod block;
pub mod chunktopk;
pub mod fp8;
pub mod halves;
mod places;
pub mod randomk;
pub mod sign;
pub mod sparse;
pub mod topk;

use std::ops::Range;

use half::{bf16, f16};

use crate::error::{Error, Result};

/// What is encoded.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// `torch.float32`
    F32(&'a [f32]),
    /// `torch.float16`
    F16(&'a [f16]),
    /// `torch.bfloat16`
    BF16(&'a [bf16]),
}

impl Values<'_> {
    /// How many values.
    pub fn len(&self) -> usize {
        match self {
            Values::F32(x) => x.len(),
            Values::F16(x) => x.len(),
            Values::BF16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those in a range.
    fn part(self, range: Range<usize>) -> Self {
        match self {
            Values::F32(x) => Values::F32(&x[range]),
            Values::F16(x) => Values::F16(&x[range]),
            Values::BF16(x) => Values::BF16(&x[range]),
        }
    }
}

/// Where decoded values go.
#[derive(Debug)]
pub enum Target<'a> {
    /// Written over.
    F32(&'a mut [f32]),
    /// Rounded to nearest even, written over.
    F16(&'a mut [f16]),
    /// Rounded to nearest even, written over.
    BF16(&'a mut [bf16]),
    /// Multiplied by the weight and added.
    Add(&'a mut [f32], f32),
}

impl Target<'_> {
    /// How many values.
    pub fn len(&self) -> usize {
        match self {
            Target::F32(x) | Target::Add(x, _) => x.len(),
            Target::F16(x) => x.len(),
            Target::BF16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// For those in a range.
    fn part(&mut self, range: Range<usize>) -> Target<'_> {
        match self {
            Target::F32(x) => Target::F32(&mut x[range]),
            Target::F16(x) => Target::F16(&mut x[range]),
            Target::BF16(x) => Target::BF16(&mut x[range]),
            Target::Add(x, weight) => Target::Add(&mut x[range], *weight),
        }
    }
}

/// What becomes of the part that the code does not hold.
#[derive(Debug)]
pub enum Keep<'a> {
    /// It is lost.
    Nothing,
    /// Error feedback: what was kept is added before encoding, and the new loss is kept. A loss
    /// that is not finite is forgotten: it has been told once, and must not come back for ever.
    Feedback(&'a mut [f32]),
    /// The loss of this call: source minus decoded.
    Remainder(&'a mut [f32]),
}

impl Keep<'_> {
    fn len(&self) -> Option<usize> {
        match self {
            Keep::Nothing => None,
            Keep::Feedback(r) | Keep::Remainder(r) => Some(r.len()),
        }
    }

    /// For the values in a range.
    fn part(&mut self, range: Range<usize>) -> Keep<'_> {
        match self {
            Keep::Nothing => Keep::Nothing,
            Keep::Feedback(r) => Keep::Feedback(&mut r[range]),
            Keep::Remainder(r) => Keep::Remainder(&mut r[range]),
        }
    }
}

/// Floats to bytes and back. See the module for what an implementation promises.
pub trait Codec: Send + Sync {
    /// Bytes of the code of `n` values.
    fn size(&self, n: usize) -> usize;

    /// Writes the code. Lengths have been checked by [`encode`]; `seed` is for codecs that draw.
    fn encode(&self, src: Values<'_>, keep: Keep<'_>, seed: u64, out: &mut [u8]);

    /// Reads a code of the right size.
    ///
    /// # Errors
    ///
    /// What is wrong with the bytes.
    fn decode(&self, code: &[u8], out: Target<'_>) -> Result<(), String>;
}

/// Encodes, once lengths agree.
///
/// # Errors
///
/// [`Error::Misuse`] when the output or the residual has the wrong length.
pub fn encode(codec: &dyn Codec, src: Values<'_>, keep: Keep<'_>, seed: u64, out: &mut [u8]) -> Result<()> {
    let n = src.len();
    if out.len() != codec.size(n) {
        let want = codec.size(n);
        return Err(Error::misuse(format!(
            "encode: the code of {n} values takes {want} bytes, the output has {}",
            out.len()
        )));
    }
    if keep.len().is_some_and(|r| r != n) {
        return Err(Error::misuse("encode: the residual must have as many values as the input"));
    }
    codec.encode(src, keep, seed, out);
    Ok(())
}

/// Decodes what may be anything.
///
/// # Errors
///
/// [`Error::Corrupt`] when the bytes are no code of that many values. `from` is the rank blamed.
pub fn decode(codec: &dyn Codec, code: &[u8], out: Target<'_>, from: u32) -> Result<()> {
    let (n, want) = (out.len(), codec.size(out.len()));
    let read = match code.len() == want {
        true => codec.decode(code, out),
        false => Err(format!("a code of {n} values has {want} bytes, not {}", code.len())),
    };
    read.map_err(|what| Error::Corrupt { rank: from, what })
}

/// The codec of a name, as users write it: `int8`, `topk:0.01`. A new codec is added here.
///
/// # Errors
///
/// [`Error::Unsupported`] with what there is.
pub fn find(name: &str, block: Option<usize>) -> Result<Box<dyn Codec>> {
    let (kind, parameter) = name.split_once(':').map_or((name, None), |(k, p)| (k, Some(p)));
    let refuse = |why: String| Err(Error::Unsupported(format!("codec {name:?}: {why}")));
    if block.is_some_and(|b| b == 0 || b > block::MAX || b % 8 != 0) {
        return refuse(format!("block must be a multiple of 8, at most {}", block::MAX));
    }
    if let Some(block) = block.filter(|_| !matches!(kind, "int8" | "int4" | "fp8" | "sign")) {
        return refuse(format!("it has no blocks; remove block={block}"));
    }
    let fraction = match (kind, parameter) {
        ("topk" | "randomk" | "chunktopk", Some(p)) => match p.parse::<f64>() {
            Ok(f) if f > 0.0 && f <= 1.0 => f,
            _ => return refuse(format!("the fraction is a number above 0 and up to 1, as in {kind}:0.02")),
        },
        ("topk" | "randomk" | "chunktopk", None) => {
            return refuse(format!("write {kind}:FRACTION, as in {kind}:0.02"));
        }
        (_, Some(_)) => return refuse(format!("{kind} has no parameter")),
        _ => 0.0,
    };
    Ok(match kind {
        "bf16" => Box::new(block::Blocks::new(halves::Bf16, 1024)),
        "f16" => Box::new(block::Blocks::new(halves::F16, 1024)),
        "int8" => Box::new(block::Blocks::new(affine::Affine::<8>, block.unwrap_or(512))),
        "int4" => Box::new(block::Blocks::new(affine::Affine::<4>, block.unwrap_or(32))),
        "fp8" => Box::new(block::Blocks::new(fp8::Fp8::default(), block.unwrap_or(128))),
        "sign" => Box::new(block::Blocks::new(sign::Sign, block.unwrap_or(256))),
        "topk" => Box::new(topk::TopK { fraction }),
        "randomk" => Box::new(randomk::RandomK { fraction }),
        "chunktopk" => Box::new(chunktopk::ChunkTopK { fraction }),
        _ => {
            let fractions = "topk:FRACTION, randomk:FRACTION and chunktopk:FRACTION";
            return refuse(format!("unknown; there are bf16, f16, int8, int4, fp8, sign, {fractions}"));
        }
    })
}
