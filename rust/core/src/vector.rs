//! Which vector unit of the processor the loops over numbers use.
//!
//! `pulp` compiles them for several and takes the best that the processor has. `TRIGRAM_VECTOR_UNIT` holds them to
//! a lower one (`scalar`, `avx2`, `avx512`), so that a test on one machine sees what another one computes. A unit
//! that the processor lacks, or an unknown name, means the best one.

use std::sync::OnceLock;

/// The unit in use, decided by the first loop.
#[inline]
pub(crate) fn unit() -> pulp::Arch {
    static UNIT: OnceLock<pulp::Arch> = OnceLock::new();
    *UNIT.get_or_init(|| {
        let wanted = std::env::var("TRIGRAM_VECTOR_UNIT").unwrap_or_default();
        named(&wanted).unwrap_or_default()
    })
}

fn named(name: &str) -> Option<pulp::Arch> {
    match name {
        "scalar" => Some(pulp::Arch::Scalar),
        #[cfg(target_arch = "x86_64")]
        "avx2" => pulp::x86::V3::try_new().map(pulp::Arch::V3),
        #[cfg(target_arch = "x86_64")]
        "avx512" => pulp::x86::V4::try_new().map(pulp::Arch::V4),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_have_names() {
        assert!(matches!(named("scalar"), Some(pulp::Arch::Scalar)));
        assert!(named("").is_none() && named("mmx").is_none());
    }
}
