//! Shares of a scatter-gather by what each rank's link carries.
//!
//! p ranks on a switch; rank i sends, and at the same time receives, at most B_i. A rank that reduces
//! the share w_i of S bytes sends S (1 - w_i) to the others and S w_i (p - 1) of results: S (1 + (p -
//! 2) w_i), and receives as much. No AllReduce is faster than
//!
//! ```text
//! T = S max( max_i 1/B_i , 2 (p - 1) / sum B_i )
//! ```
//!
//! for every rank must send and receive at least S, and 2 (p - 1) S must go through all links
//! together. The shares w_i = (B_i T/S - 1) / (p - 2) meet it: they are not negative, because T >= S /
//! B_i, and their sum is at least 1, because T >= 2 (p - 1) S / sum B_i. A ring makes every link carry
//! 2 (p - 1)/p S, whatever the size of its chunks: a link at half rate costs it 3 S/B with 4 ranks,
//! and 2 S/B here.
//!
//! A helper, which has no data, receives S w_i from each of p workers and sends as much: w_i = B_i T/(p S).
//! Then the shares add up to 1 for T = S 2 (p - 1) / (sum of the workers' B_i + (p - 2)/p of the helpers'), and T is
//! at least S / B_i for each worker. With two workers, each moves S whatever the shares: helpers are of no use.

/// Where the slowest link has at least this part of the fastest one's rate, shares are equal: what
/// differs less is mostly noise, and equal shares cut the data into equal pieces.
const EQUAL: f64 = 0.8;

/// Rates that differ by less than this part of each other are the same rate.
const SAME: f64 = 0.1;

/// Shares are multiples of this many elements, so that they begin on cache lines.
const GRAIN: usize = 64;

/// Seconds that an AllReduce of `bytes` takes at least, over links of these bytes per second, of which the last
/// `helpers` are those of ranks without data.
pub fn bound(bytes: f64, rates: &[f64], helpers: usize) -> f64 {
    let (workers, helpers) = rates.split_at(rates.len() - helpers);
    let p = workers.len() as f64;
    let slowest = workers.iter().fold(f64::INFINITY, |a, &b| a.min(b));
    let sum = workers.iter().sum::<f64>() + (p - 2.0).max(0.0) / p * helpers.iter().sum::<f64>();
    bytes * (1.0 / slowest).max(2.0 * (p - 1.0) / sum)
}

/// Whether the slowest link is about as fast as the fastest; not so if there are none.
pub fn is_equal(rates: &[f64]) -> bool {
    let (least, most) = rates.iter().fold((f64::INFINITY, 0.0f64), |(a, b), &r| (a.min(r), b.max(r)));
    !rates.is_empty() && least >= EQUAL * most
}

/// Whether equal links are still equal, and none has become slower.
pub fn are_better(now: &[f64], before: &[f64]) -> bool {
    is_equal(before)
        && is_equal(now)
        && now.iter().zip(before).all(|(now, before)| *now > (1.0 - SAME) * before)
}

/// How many of `len` elements each rank reduces, so that the AllReduce meets [`bound`]. Rates that
/// are no positive numbers, or nearly equal, and two ranks or fewer, give equal shares.
///
/// The same on all ranks that give the same rates: only IEEE additions, divisions and products.
pub fn shares(len: usize, rates: &[f64], helpers: usize) -> Vec<usize> {
    let p = rates.len();
    let workers = p - helpers;
    let known = rates.iter().all(|r| r.is_finite() && *r > 0.0);
    if workers < 3 || !known || helpers == 0 && is_equal(rates) {
        let mut shares = crate::schedule::even_shares(len, workers);
        shares.resize(p, 0);
        return shares;
    }
    let time = bound(1.0, rates, helpers);
    let part = |(i, b): (usize, &f64)| match i < workers {
        true => ((b * time - 1.0) / (workers as f64 - 2.0)).max(0.0),
        false => b * time / workers as f64,
    };
    let parts: Vec<f64> = rates.iter().enumerate().map(part).collect();
    let sum: f64 = parts.iter().sum();
    // Borders are rounded, not shares: so they add up.
    let mut upto = 0.0;
    let mut start = 0;
    let mut shares = Vec::with_capacity(p);
    for (i, part) in parts.iter().enumerate() {
        upto += part / sum;
        let border = ((upto * len as f64 / GRAIN as f64).round() as usize * GRAIN).min(len);
        let end = if i + 1 == p { len } else { border.max(start) };
        shares.push(end - start);
        start = end;
    }
    // The rounding error of the last border must not fall to a rank that was to have nothing.
    if let (Some(&0.0), Some(last)) = (parts.last(), shares.last_mut()) {
        let rest = std::mem::take(last);
        if let Some(i) = parts.iter().rposition(|&w| w > 0.0) {
            shares[i] += rest;
        }
    }
    shares
}

/// The rates to go by: those declared now, or still the previous ones where nothing has changed that
/// is worth other schedules. `None`: somebody does not know its rate yet.
pub fn agree(previous: &[f64], declared: &[Option<f64>]) -> Vec<f64> {
    let Some(declared) = declared.iter().copied().collect::<Option<Vec<f64>>>() else {
        return previous.to_vec();
    };
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= SAME * a.max(*b);
    if previous.len() == declared.len() && previous.iter().zip(&declared).all(near) {
        return previous.to_vec();
    }
    declared
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_at_half_rate_reduces_nothing_among_four() {
        let shares = shares(3 * 64 * 100, &[1.0, 0.5, 1.0, 1.0], 0);
        assert_eq!(shares, [6400, 0, 6400, 6400]);
        assert!((bound(1.0, &[1.0, 0.5, 1.0, 1.0], 0) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn a_slow_last_rank_gets_nothing_of_the_rounding() {
        let shares = shares(1000, &[1.0, 1.0, 1.0, 0.5], 0);
        assert_eq!((shares[3], shares.iter().sum::<usize>()), (0, 1000));
    }

    #[test]
    fn in_between_all_links_are_full() {
        // T = 6/3.75 = 1.6; w = (B T - 1)/2 = 0.3, 0.3, 0.3, 0.1.
        assert_eq!(shares(64_000, &[1.0, 1.0, 1.0, 0.75], 0), [19_200, 19_200, 19_200, 6_400]);
    }

    #[test]
    fn what_is_nearly_equal_or_unknown_is_equal() {
        assert_eq!(shares(10, &[1.0, 0.9, 1.0], 0), [4, 3, 3]);
        assert_eq!(shares(10, &[1.0, 0.0, 1.0], 0), [4, 3, 3]);
        assert_eq!(shares(10, &[1.0, f64::NAN, 1.0], 0), [4, 3, 3]);
        assert_eq!(shares(10, &[1.0, 0.1], 0), [5, 5]);
    }

    #[test]
    fn helpers_take_what_their_links_carry() {
        // Three workers alone take 4/3, with a helper of their rate 6/5, with a faster one 1.
        let all = |helper| [1.0, 1.0, 1.0, helper];
        assert!((bound(1.0, &all(1.0)[..3], 0) - 4.0 / 3.0).abs() < 1e-12);
        assert!((bound(1.0, &all(1.0), 1) - 1.2).abs() < 1e-12);
        assert!((bound(1.0, &all(4.0), 1) - 1.0).abs() < 1e-12);
        assert_eq!(shares(64_000, &all(1.0), 1), [12_800, 12_800, 12_800, 25_600]);
        assert_eq!(shares(64_000, &all(4.0), 1), [0, 0, 0, 64_000]);
        assert_eq!(shares(10, &[1.0, 1.0, 9.0], 1), [5, 5, 0]);
    }

    #[test]
    fn small_changes_change_nothing() {
        assert_eq!(agree(&[1.0, 2.0], &[Some(1.05), Some(2.0)]), [1.0, 2.0]);
        assert_eq!(agree(&[1.0, 2.0], &[Some(0.5), Some(2.0)]), [0.5, 2.0]);
        assert_eq!(agree(&[], &[Some(0.5), None]), [0.0; 0]);
    }
}
