//! The messages under way on a connection, by number.

/// So many can be under way at once; NCCL wants 32.
pub(crate) const SLOTS: usize = 64;

/// Messages have numbers from 0 up; each has a slot from when it is posted until its end was reported.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    next: u64,
    slots: [Option<(u64, T)>; SLOTS],
}

impl<T> Ring<T> {
    /// Without messages.
    pub(crate) fn new() -> Self {
        Self { next: 0, slots: std::array::from_fn(|_| None) }
    }

    /// The number that the next message gets.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Posts a message; its slot, or `None` if there is no room.
    pub(crate) fn push(&mut self, message: T) -> Option<usize> {
        let slot = slot_of(self.next);
        if self.slots[slot].is_some() {
            return None;
        }
        self.slots[slot] = Some((self.next, message));
        self.next += 1;
        Some(slot)
    }

    /// The message of that number, if it is under way.
    pub(crate) fn by_number(&mut self, number: u64) -> Option<&mut T> {
        match &mut self.slots[slot_of(number)] {
            Some((mine, message)) if *mine == number => Some(message),
            _ => None,
        }
    }

    /// The message in a slot.
    pub(crate) fn in_slot(&self, slot: usize) -> Option<&T> {
        self.slots.get(slot)?.as_ref().map(|(_, message)| message)
    }

    /// Ends the message in a slot.
    pub(crate) fn take(&mut self, slot: usize) -> Option<T> {
        self.slots.get_mut(slot)?.take().map(|(_, message)| message)
    }

    /// Ends all.
    pub(crate) fn clear(&mut self) {
        self.slots.fill_with(|| None);
    }
}

fn slot_of(number: u64) -> usize {
    (number % SLOTS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_up_and_slots_come_back() {
        let mut ring = Ring::new();
        for n in 0..SLOTS {
            assert_eq!(ring.push(n), Some(n));
        }
        assert!(ring.push(99).is_none());
        assert_eq!(ring.take(0), Some(0));
        assert_eq!(ring.take(0), None);
        assert_eq!(ring.push(64), Some(0));
        assert_eq!(ring.by_number(64), Some(&mut 64));
        assert_eq!(ring.by_number(0), None, "an old number is not the slot's new one");
        assert_eq!(ring.next(), 65);
    }
}
