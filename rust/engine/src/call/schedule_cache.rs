//! The schedules of calls that were made before: a training loop repeats the same calls.

use std::collections::HashMap;
use std::sync::Arc;

use trigram_core::Result;
use trigram_core::planner::{self, Call, Lent, Links, Opening};
use trigram_core::schedule::Schedule;
use trigram_core::topology::direct;

use crate::call::agreed_rates::AgreedRates;
use crate::call::body::Body;
use crate::call::request::Message;

/// Identifies a schedule: the group, the call, the memory shared for it, and whether its payload fits the inline
/// buffer.
#[derive(PartialEq, Eq, Hash)]
struct Key(u64, Call, Lent, bool);

/// The most schedules kept, and the most steps of all of them, of about 250 bytes each: lengths that change with every
/// call must not fill the memory.
const KEPT: usize = 1024;
const MOST_STEPS: usize = 1 << 18;

/// A schedule, and the version of the agreed rates that it was made for (0 if it depends on no rates).
type Cached = (u64, Arc<Schedule>);

/// Cached schedules, by call.
#[derive(Default)]
pub struct ScheduleCache {
    /// See [`Links::far`].
    far: bool,
    kept: HashMap<Key, Cached>,
    /// Steps of all that is kept, and of what it has replaced.
    steps: usize,
    /// The last one found. Most loops repeat one call, and comparing keys is faster than hashing.
    last: Option<(Key, Cached)>,
}

impl ScheduleCache {
    /// For a rank whose links are far, or not.
    pub(crate) fn new(far: bool) -> Self {
        Self { far, ..Self::default() }
    }

    /// The cached schedule of a call, or the key back.
    fn find(&mut self, key: Key, version: u64) -> Result<Arc<Schedule>, Key> {
        if let Some((_, (_, schedule))) = self.last.as_ref().filter(|l| l.0 == key && l.1.0 == version) {
            return Ok(schedule.clone());
        }
        let Some(cached) = self.kept.get(&key).filter(|k| k.0 == version).cloned() else { return Err(key) };
        let schedule = cached.1.clone();
        self.last = Some((key, cached));
        Ok(schedule)
    }

    fn keep(&mut self, key: Key, version: u64, schedule: &Arc<Schedule>) {
        self.steps += schedule.steps.len();
        if self.kept.len() >= KEPT || self.steps > MOST_STEPS {
            self.kept.clear();
            self.steps = schedule.steps.len();
        }
        self.kept.insert(key, (version, schedule.clone()));
    }

    /// The schedule of a call whose shared memory is known. `rates`: what its group has agreed on, if the schedule
    /// depends on it.
    pub(crate) fn schedule(
        &mut self,
        body: &Body,
        opening: Opening,
        rates: Option<&AgreedRates>,
    ) -> Result<Arc<Schedule>> {
        let (members, request) = (&body.members, &body.request);
        let one_shot = opening == Opening::OneShot;
        if let Some(Message { peer, sends, .. }) = request.message {
            let piece = (planner::PIECE_BYTES / request.call.dtype.size()).max(1);
            let make = if sends { direct::send } else { direct::recv };
            return Ok(Arc::new(make(members.me, peer, request.call.len, piece)));
        }
        let version = rates.map_or(0, AgreedRates::version);
        let key = Key(members.id, request.call.clone(), body.lent, one_shot);
        let key = match self.find(key, version) {
            Ok(schedule) => return Ok(schedule),
            Err(key) => key,
        };
        let schedule = Arc::new(match one_shot {
            true => planner::one_shot(&request.call, &members.layout),
            false => {
                let links = rates.map(AgreedRates::links).unwrap_or_default();
                let links = Links { far: self.far, ..links };
                planner::schedule(&request.call, &members.layout, body.lent, links)?
            }
        });
        self.keep(key, version, &schedule);
        Ok(schedule)
    }
}

#[cfg(test)]
mod tests {
    use trigram_core::signature::{Collective, Via};
    use trigram_core::{DType, topology::Shape};

    use super::*;

    #[test]
    fn schedules_of_many_steps_do_not_fill_the_memory() {
        let mut cache = ScheduleCache::new(false);
        let keep = |cache: &mut ScheduleCache, len: usize| {
            let call = Call {
                what: Collective::Barrier,
                dtype: DType::U8,
                len,
                root: 0,
                via: Via::Auto,
                splits: None,
            };
            let shape = Shape { me: 0, world: 2, len: 10_000 * len, piece: 1 };
            let schedule = Arc::new(direct::broadcast(shape, 0, 0));
            cache.keep(Key(1, call, Lent::Nothing, false), 0, &schedule);
            schedule.steps.len()
        };
        for len in 1..12 {
            let steps = keep(&mut cache, len);
            assert!(steps > 10_000 * len && cache.steps <= MOST_STEPS.max(steps));
            let held: usize = cache.kept.values().map(|cached| cached.1.steps.len()).sum();
            assert_eq!(held, cache.steps);
        }
        assert!(keep(&mut cache, 30) > MOST_STEPS);
        assert_eq!(cache.kept.len(), 1, "one is kept, however large");
        keep(&mut cache, 1);
        assert_eq!(cache.kept.len(), 1);
    }
}
