//! Finds calls among many under way: by their number in this process, by group and call, and those to look at in the
//! next round of progress.
//!
//! A call that waits for a message needs no look until the message has come. With thousands of calls under way, a round
//! of progress then costs as much as the few that can move.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use trigram_core::wire::CallId;

/// Mixes keys that this rank has chosen itself, so that nobody can choose them to collide.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type Map<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// The calls with one group and number: messages between different ranks may have the same.
#[derive(Debug)]
enum Ids {
    One(u64),
    Several(Vec<u64>),
}

/// Where calls are in the list of those under way.
#[derive(Debug, Default)]
pub(crate) struct Index {
    positions: Map<u64, usize>,
    calls: Map<(u64, CallId), Ids>,
    /// By position, a bit each: whether to look at the call in the next round.
    due: Vec<u64>,
}

impl Index {
    /// A call was added at the end of the list, at `position`. It is due.
    pub(crate) fn add(&mut self, position: usize, id: u64, group: u64, call: CallId) {
        self.positions.insert(id, position);
        self.name(id, (group, call));
        if self.due.len() * 64 <= position {
            self.due.push(0);
        }
        self.set_due(position, true);
    }

    /// A call has another number now.
    pub(crate) fn rename(&mut self, id: u64, before: (u64, CallId), after: (u64, CallId)) {
        self.forget(id, &before);
        self.name(id, after);
    }

    fn name(&mut self, id: u64, key: (u64, CallId)) {
        match self.calls.get_mut(&key) {
            None => drop(self.calls.insert(key, Ids::One(id))),
            Some(Ids::Several(ids)) => ids.push(id),
            Some(ids) => {
                if let Ids::One(first) = *ids {
                    *ids = Ids::Several(vec![first, id]);
                }
            }
        }
    }

    fn forget(&mut self, id: u64, key: &(u64, CallId)) {
        let is_empty = match self.calls.get_mut(key) {
            Some(Ids::Several(ids)) => {
                ids.retain(|&other| other != id);
                ids.is_empty()
            }
            _ => true,
        };
        if is_empty {
            self.calls.remove(key);
        }
    }

    /// The call at `position` is taken out, and the last of the list, of `len` calls so far, takes its place; `moved` is
    /// its number.
    pub(crate) fn remove(&mut self, position: usize, len: usize, id: u64, key: (u64, CallId), moved: u64) {
        self.positions.remove(&id);
        self.forget(id, &key);
        self.set_due(position, self.is_due(len - 1));
        self.set_due(len - 1, false);
        if moved != id {
            self.positions.insert(moved, position);
        }
    }

    /// The position of the call with this number.
    pub(crate) fn position(&self, id: u64) -> Option<usize> {
        self.positions.get(&id).copied()
    }

    /// The positions of the calls with this group and number.
    pub(crate) fn with(&self, group: u64, call: CallId) -> impl Iterator<Item = usize> + '_ {
        let ids = match self.calls.get(&(group, call)) {
            None => &[],
            Some(Ids::One(id)) => std::slice::from_ref(id),
            Some(Ids::Several(ids)) => ids.as_slice(),
        };
        ids.iter().filter_map(|&id| self.position(id))
    }

    fn is_due(&self, position: usize) -> bool {
        self.due.get(position / 64).is_some_and(|word| word >> (position % 64) & 1 == 1)
    }

    /// Whether to look at the call in the next round.
    pub(crate) fn set_due(&mut self, position: usize, due: bool) {
        if let Some(word) = self.due.get_mut(position / 64) {
            let bit = 1 << (position % 64);
            *word = if due { *word | bit } else { *word & !bit };
        }
    }

    /// The first position from `from` on of a call to look at.
    pub(crate) fn next_due(&self, from: usize) -> Option<usize> {
        let first = self.due.get(from / 64)? >> (from % 64);
        if first != 0 {
            return Some(from + first.trailing_zeros() as usize);
        }
        let mut later = self.due.iter().enumerate().skip(from / 64 + 1);
        later.find(|(_, word)| **word != 0).map(|(i, word)| 64 * i + word.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list as the index is for, searched from end to end.
    type List = Vec<(u64, (u64, CallId), bool)>;

    fn agree(index: &Index, list: &List) {
        for (at, (id, (group, call), _)) in list.iter().enumerate() {
            assert_eq!(index.position(*id), Some(at));
            let mut found: Vec<_> = index.with(*group, *call).collect();
            found.sort_unstable();
            let right = list.iter().enumerate().filter(|(_, other)| other.1 == (*group, *call));
            assert_eq!(found, right.map(|(i, _)| i).collect::<Vec<_>>());
        }
        let (mut due, mut from) = (Vec::new(), 0);
        while let Some(at) = index.next_due(from) {
            due.push(at);
            from = at + 1;
        }
        let right = list.iter().enumerate().filter(|(_, call)| call.2).map(|(i, _)| i);
        assert_eq!(due, right.collect::<Vec<_>>());
    }

    #[test]
    fn it_finds_what_a_search_finds() {
        let (mut index, mut list, mut seed) = (Index::default(), List::new(), 1u64);
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % n
        };
        for round in 0..3000u64 {
            if list.is_empty() || list.len() < 300 && below(5) > 1 {
                let key = (below(3) as u64, CallId::message(below(3) as u32, below(40) as u64));
                index.add(list.len(), round, key.0, key.1);
                list.push((round, key, true));
            } else if below(3) > 0 {
                let (at, due) = (below(list.len()), below(4) == 0);
                index.set_due(at, due);
                list[at].2 = due;
            } else {
                let at = below(list.len());
                let (last, (id, key, _)) = (list[list.len() - 1].0, list[at]);
                index.remove(at, list.len(), id, key, last);
                list.swap_remove(at);
            }
            if round % 16 == 0 {
                agree(&index, &list);
            }
        }
        agree(&index, &list);
    }
}
