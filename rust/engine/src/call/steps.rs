//! Carries out the steps of a schedule on real memory and connections.
//!
//! This file, [`crate::call::body`] (which resolves addresses) and [`crate::link::frames`] hold all accesses to
//! callers' memory.

use trigram_core::executor::{Io, Started};
use trigram_core::schedule::{Buf, Loc, Place, Span};
use trigram_core::update::{self, Rounding};
use trigram_core::{Error, Result};

use crate::call::body::{Body, EAGER, PendingReduce};
use crate::call::fold::{Ends, FEW, Sum, Summing, TILE};
use crate::lanes::pool::{Lanes, Ticket};
use crate::link::outbox::Outbox;
use crate::sys::copy::{MUCH, copy_past_cache};

/// Carries out the steps of one call.
pub(crate) struct StepRunner<'a> {
    pub(crate) body: &'a mut Body,
    pub(crate) out: &'a mut Outbox,
}

/// Bytes that the reductions of one call read and write in one turn: about a millisecond. Between two turns the thread
/// that drives sends heartbeats and frames, and moves other calls.
pub(crate) const TURN: usize = 8 << 20;

impl Io for StepRunner<'_> {
    fn send(&mut self, step: u32, to: Place, tag: u32, span: Span) -> Result<Started> {
        let body = &mut *self.body;
        let size = body.request.call.dtype.size();
        if body.schedule.sent_to(to) * size > EAGER && !body.inside.contains(&to) {
            body.held.push((step, to, tag, span));
            return Ok(Started::Later);
        }
        body.transmit(step, to, tag, span, self.out)
    }

    fn recv(&mut self, _step: u32, from: Place, tag: u32, span: Span) -> Result<Started> {
        let body = &mut *self.body;
        let Some(i) = body.arrived.iter().position(|m| m.0 == from && m.1 == tag) else {
            return Ok(Started::Later);
        };
        let (_, _, bytes) = body.arrived.swap_remove(i);
        if bytes.len() != span.len * body.request.call.dtype.size() {
            let rank = body.members.ranks[from as usize];
            return Err(Error::Corrupt {
                rank,
                what: format!("it sent {} bytes in a message of {} elements", bytes.len(), span.len),
            });
        }
        body.put(span, &bytes)?;
        Ok(Started::Done)
    }

    fn reduce(&mut self, step: u32, from: &[Loc], to: &[Loc], finish: bool) -> Result<Started> {
        let body = &mut *self.body;
        if body.shown && to.iter().any(|loc| loc.span.buf == Buf::Bounce) {
            return Ok(Started::Done);
        }
        let lanes = &*self.out.lanes;
        let len = from.first().map_or(0, |loc| loc.span.len) * body.request.call.dtype.size();
        if body.pending.is_empty() && lanes.want(len, len) && body.hand_over(step, from, to, finish, lanes)? {
            return Ok(Started::Later);
        }
        // What waits for its turn goes first.
        let done = if body.pending.is_empty() { body.fold(from, to, finish, 0)? } else { Some(0) };
        Ok(match done {
            None => Started::Done,
            Some(at) => {
                body.pending.push_back(PendingReduce { step, at });
                Started::Later
            }
        })
    }

    fn barrier(&mut self, step: u32, ordinal: u32) -> Result<Started> {
        let body = &mut *self.body;
        if ordinal == 0 && body.members.all_arrived(body.call_id, 0) {
            return Ok(Started::Done); // the opening barrier, passed already
        }
        body.members.arrive(body.call_id, ordinal);
        body.barrier = Some((step, ordinal));
        Ok(Started::Later)
    }
}

impl Body {
    /// Lets a lane make a sum of what lies in one place each; false if it is none, or enough of them wait.
    pub(crate) fn hand_over(
        &mut self,
        step: u32,
        from: &[Loc],
        to: &[Loc],
        finish: bool,
        lanes: &Lanes,
    ) -> Result<bool> {
        let len = from.first().map_or(0, |loc| loc.span.len) * self.request.call.dtype.size();
        let fits = self.summing.len() < lanes.most_sums()
            && self.request.update.is_none()
            && from.iter().chain(to).all(|loc| self.run_length(*loc, 0) >= len);
        if !fits {
            return Ok(false);
        }
        let mut ends = vec![(std::ptr::null_mut(), std::ptr::null_mut()); from.len().max(to.len())];
        let sum = self.resolve(from, to, finish, 0, len, &mut ends)?;
        // SAFETY: as for `fold_run`, and the call takes the work back before its memory goes.
        let work = unsafe { Summing::new(sum, ends, len) };
        self.summing.push((step, lanes.submit(Ticket::Summed(self.id, step), work)));
        Ok(true)
    }

    /// Folds `from` into each of `to` from byte `start` on, as far as this turn's bytes suffice. Returns where the
    /// next turn goes on; `None` if all is done.
    pub(crate) fn fold(
        &mut self,
        from: &[Loc],
        to: &[Loc],
        finish: bool,
        start: usize,
    ) -> Result<Option<usize>> {
        if self.request.update.is_some() {
            return self.update(from, to, start);
        }
        if self.request.lists.is_none() {
            return self.fold_run(from, to, finish, start, usize::MAX);
        }
        let mut at = start;
        loop {
            // As far as all tensors of lists go.
            let runs = from.iter().chain(to).map(|loc| self.run_length(*loc, at));
            let most = runs.min().unwrap_or(usize::MAX);
            match self.fold_run(from, to, finish, at, most)? {
                Some(next) if next > at => at = next,
                end => return Ok(end),
            }
        }
    }

    /// As [`Body::fold`], but the mean of `from` updates this rank's weights and their state, and each of `to` gets
    /// these weights.
    fn update(&mut self, from: &[Loc], to: &[Loc], start: usize) -> Result<Option<usize>> {
        const WIDTH: usize = size_of::<f32>();
        let Some(first) = from.first().map(|loc| loc.span) else { return Ok(None) };
        let all = first.len * WIDTH;
        let operands = from.len() + to.len() + 2; // and the states
        let most = (self.turn / operands / TILE).max(usize::from(self.turn == TURN)) * TILE;
        let len = most.min(all - start);
        if len == 0 && all > start {
            return Ok(Some(start));
        }
        self.turn -= (len * operands).min(self.turn);
        let me = self.members.me;
        let sources = from.iter().map(|loc| self.at_byte(*loc, start)).collect::<Result<Vec<_>>>()?;
        let mut own = std::ptr::null_mut();
        let mut others = Vec::with_capacity(to.len());
        for loc in to {
            let at = self.at_byte(*loc, start)?;
            if loc.place == me { own = at } else { others.push(at) }
        }
        let Some(update) = self.request.update.as_deref().filter(|_| !own.is_null()) else { return Ok(None) };
        let begin = first.start + start / WIDTH;
        let end = begin + len / WIDTH;
        let mut gradients: Vec<&[u8]> = vec![&[]; sources.len()];
        let skipped = update.pieces.partition_point(|piece| piece.stop <= begin);
        for piece in update.pieces[skipped..].iter().take_while(|piece| piece.start < end) {
            let Some(rule) = update.rules.get(piece.rule) else { continue };
            let (low, high) = (piece.start.max(begin), piece.stop.min(end));
            for at in (low..high).step_by(update::TILE) {
                let count = update::TILE.min(high - at);
                let (offset, bytes) = ((at - begin) * WIDTH, count * WIDTH);
                for (gradient, source) in gradients.iter_mut().zip(&sources) {
                    // SAFETY: `at_byte` has checked the span, of which this is a part. Between the barriers of its
                    // schedule nobody writes to it, and no slice outlives the tile.
                    *gradient = unsafe { std::slice::from_raw_parts(source.add(offset).cast_const(), bytes) };
                }
                // SAFETY: as above; and only this rank reads or writes its part of its own weights.
                let weights = unsafe { std::slice::from_raw_parts_mut(own.add(offset), bytes) };
                let mut k = 0;
                let states = piece.states.map(|state| -> &mut [u8] {
                    k += 1;
                    if k > rule.states() {
                        return &mut [];
                    }
                    // SAFETY: the caller has given as many values of state as the piece has, which only this call
                    // uses.
                    unsafe { std::slice::from_raw_parts_mut(state.add((at - piece.start) * WIDTH), bytes) }
                });
                let flipped_from = piece.flipped_from.saturating_sub(at);
                let rounding = Rounding { fused: update.fused, flipped_from };
                update::step(rule, rounding, &gradients, weights, states)?;
                for other in &others {
                    // SAFETY: both spans are checked, and of different ranks.
                    unsafe { copy_past_cache(own.add(offset).cast_const(), other.add(offset), bytes) };
                }
            }
        }
        self.direct_bytes += ((from.len() + to.len()).saturating_sub(2) * len) as u64;
        Ok((start + len < all).then_some(start + len))
    }

    /// The same as [`Body::fold`], of at most `most` bytes of each operand, which lie in one place.
    fn fold_run(
        &mut self,
        from: &[Loc],
        to: &[Loc],
        finish: bool,
        start: usize,
        most: usize,
    ) -> Result<Option<usize>> {
        let body = self;
        let all = from.first().map_or(0, |l| l.span.len) * body.request.call.dtype.size();
        let operands = from.len().max(to.len()).max(1);
        let len = if (all - start) * operands <= body.turn {
            all - start
        } else {
            // A multiple of the tile, which is one of every element's size; at least one in a turn.
            let tiles = (body.turn / operands / TILE).max(usize::from(body.turn == TURN));
            (tiles * TILE).min(all - start)
        };
        let len = len.min(most);
        if len == 0 && all > start {
            return Ok(Some(start));
        }
        body.turn -= (len * operands).min(body.turn);
        let end = start + len;
        let mut few = [(std::ptr::null_mut(), std::ptr::null_mut()); FEW];
        let mut many;
        let count = from.len().max(to.len());
        let ends = if count <= FEW {
            &mut few[..count]
        } else {
            many = vec![(std::ptr::null_mut(), std::ptr::null_mut()); count];
            &mut many[..]
        };
        let sum = body.resolve(from, to, finish, start, len, ends)?;
        // SAFETY: `resolve` has checked every span against its memory. Between the barriers of its schedule nobody else
        // writes to these spans, and different ones do not overlap.
        unsafe { sum.make(ends, 0..len)? };
        Ok((end < all).then_some(end))
    }

    /// The sum of `len` bytes of each of `from` into each of `to`, from byte `start` on, and the addresses of all.
    fn resolve(
        &mut self,
        from: &[Loc],
        to: &[Loc],
        finish: bool,
        start: usize,
        len: usize,
        ends: &mut [Ends],
    ) -> Result<Sum> {
        let past_cache = match self.request.tensors.output_len >= MUCH {
            true => {
                to.iter().take(64).rev().fold(0, |bits, to| bits << 1 | u64::from(to.span.buf == Buf::Out))
            }
            false => 0,
        };
        for (end, loc) in ends.iter_mut().zip(from) {
            end.0 = self.at_byte(*loc, start)?;
        }
        for (end, loc) in ends.iter_mut().zip(to) {
            end.1 = self.at_byte(*loc, start)?;
        }
        let me = self.members.me;
        let away = from.iter().chain(to).filter(|l| l.place != me).count();
        self.direct_bytes += (away * len) as u64;
        Ok(Sum {
            dtype: self.request.call.dtype,
            op: self.request.op,
            divide_by: finish.then_some(self.members.layout.workers()),
            sources: from.len(),
            destinations: to.len(),
            in_place: from == to,
            past_cache,
        })
    }
}
