//! AllReduce over a double binary tree.
//!
//! Two binary trees span the ranks so that a leaf of one is an inner node of the other. Each
//! carries half of the message, up to its root and down again, in pieces that pipeline: `4 log p`
//! latencies, `2 n` bytes per rank.
//!
//! Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
//! and scan", 2009.

use crate::schedule::{Buf, Builder, Schedule, Span};
use crate::topology::Shape;

/// A rank's neighbours in a tree; ranks from 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Towards the root; `None` at the root.
    pub parent: Option<u32>,
    /// At most two, in the order in which their sums are added.
    pub children: Vec<u32>,
}

/// The in-order binary tree over `1..=n`: odd numbers are leaves.
fn in_order(i: u32, n: u32) -> Node {
    let level = i.trailing_zeros();
    let up = (i ^ (1 << level)) | (2 << level);
    let parent = if up <= n { up } else { i ^ (1 << level) };
    let children = if level == 0 {
        vec![]
    } else {
        let left = i - (1 << (level - 1));
        // The right child may not exist at this level; its left descendants may.
        let right = (0..level).rev().map(|l| i + (1 << l)).find(|&c| c <= n);
        [Some(left), right].into_iter().flatten().collect()
    };
    Node { parent: (parent != 0).then_some(parent), children }
}

/// Rank `me`'s node in the first or second of the two trees.
///
/// The second tree is the first with ranks renamed: mirrored where the world is even, shifted by
/// one where it is odd, which makes leaves of inner nodes.
pub fn node(second: bool, me: u32, world: u32) -> Node {
    let rename = |i: u32| match (second, world % 2) {
        (false, _) => i - 1,
        (true, 0) => world - i,
        (true, _) => i % world,
    };
    let number = match (second, world % 2) {
        (false, _) => me + 1,
        (true, 0) => world - me,
        (true, _) => (me + world - 1) % world + 1,
    };
    let node = in_order(number, world);
    Node { parent: node.parent.map(rename), children: node.children.into_iter().map(rename).collect() }
}

/// In place on `Out`. Partial sums round at every level.
pub fn all_reduce(shape: Shape) -> Schedule {
    let Shape { me, world, len, piece } = shape;
    let mut b = Builder::new(me, true);
    if world == 1 {
        return b.finish();
    }
    let half = len.div_ceil(2);
    let halves = [Span::new(Buf::Out, 0, half), Span::new(Buf::Out, half, len - half)];
    for (second, half) in [false, true].into_iter().zip(halves) {
        let node = node(second, me, world);
        let landings: Vec<Span> = node.children.iter().map(|_| b.scratch(half.len)).collect();
        for (k, own) in half.pieces(piece).enumerate() {
            let mut parts: Vec<Span> = Vec::with_capacity(3);
            for (&child, landing) in node.children.iter().zip(&landings) {
                let land = Span::new(Buf::Scratch, landing.start + k * piece, own.len);
                b.recv(child, land);
                parts.push(land);
            }
            parts.insert(parts.len().min(1), own);
            if parts.len() > 1 {
                b.fold(&parts, own, node.parent.is_none());
            }
            if let Some(parent) = node.parent {
                b.send(parent, own);
            }
        }
        for own in half.pieces(piece) {
            if let Some(parent) = node.parent {
                b.recv(parent, own);
            }
            for &child in &node.children {
                b.send(child, own);
            }
        }
    }
    b.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_trees_span_all_ranks_and_share_no_inner_node() {
        let most = if cfg!(miri) { 20 } else { 200 }; // miri takes a long time
        for world in 2..most {
            let mut inner_of_both = 0;
            for second in [false, true] {
                let nodes: Vec<Node> = (0..world).map(|r| node(second, r, world)).collect();
                assert_eq!(nodes.iter().filter(|n| n.parent.is_none()).count(), 1);
                for (r, n) in (0..).zip(&nodes) {
                    assert!(n.children.len() <= 2);
                    for &c in &n.children {
                        assert_eq!(nodes[c as usize].parent, Some(r), "world {world}");
                    }
                    if let Some(p) = n.parent {
                        assert!(nodes[p as usize].children.contains(&r), "world {world} rank {r}");
                    }
                    // No cycle: the root is reached within the depth.
                    let (mut at, mut hops) = (r, 0);
                    while let Some(p) = nodes[at as usize].parent {
                        (at, hops) = (p, hops + 1);
                        assert!(hops <= 10);
                    }
                }
            }
            for r in 0..world {
                let inner = [false, true].map(|s| !node(s, r, world).children.is_empty());
                inner_of_both += u32::from(inner == [true, true]);
            }
            assert!(inner_of_both == 0, "world {world}: {inner_of_both}");
        }
    }
}
