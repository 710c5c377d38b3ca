//! Random bytes: who does not know them is a stranger.

use std::hint::black_box;
use std::io;

use crate::error::{Error, Result, is_interrupted};

/// What a handle carries, and who connects must present.
pub(crate) type Token = [u8; 32];

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0u8; N];
    let mut have = 0;
    while have < N {
        let rest = &mut bytes[have..];
        // SAFETY: the kernel writes at most `rest.len()` bytes to `rest`.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => have += got,
            Err(_) => {
                let e = io::Error::last_os_error();
                if !is_interrupted(&e) {
                    return Err(Error::io("getrandom", &e));
                }
            }
        }
    }
    Ok(bytes)
}

/// Whether two tokens are the same, in a time that does not depend on where they differ.
pub(crate) fn same(a: &Token, b: &Token) -> bool {
    let difference = a.iter().zip(b).fold(0u8, |sum, (a, b)| black_box(sum | (a ^ b)));
    black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_are_compared_in_full() {
        let (a, b): (Token, Token) = (random().unwrap(), random().unwrap());
        assert!(same(&a, &a) && !same(&a, &b));
        for at in 0..32 {
            let mut c = a;
            c[at] ^= 0x80;
            assert!(!same(&a, &c));
        }
    }
}
