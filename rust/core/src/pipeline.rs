//! The order in which the averages of a backward pass start.
//!
//! Gradients come one by one, in any order. They are averaged in *units* (buckets), and all ranks start these in one order,
//! whatever the order in which they are complete: a unit starts when all of its gradients are there and the units before
//! it were started. The engine's hooks on parameters ask this machine, and so does the simulation of a step (`trigram plan`).

/// What follows when a gradient has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It belongs to no unit.
    Elsewhere,
    /// No unit can start.
    Waits,
    /// The next unit can start: [`Pipeline::next_full`].
    Starts,
    /// Its unit was started without it.
    Late,
}

/// Which gradients of a pass are there, and which unit is next.
#[derive(Clone, Debug, Default)]
pub struct Pipeline {
    units: Vec<Vec<usize>>,
    /// By gradient, its unit.
    unit_of: Vec<Option<usize>>,
    here: Vec<bool>,
    /// By unit, how many of its gradients are not there.
    missing: Vec<usize>,
    next: usize,
}

impl Pipeline {
    /// A pipeline for `gradients` gradients. `units` are in the order in which they start; none is in two of them.
    ///
    /// # Panics
    ///
    /// If a unit has a gradient that does not exist, or that another unit has.
    pub fn new(gradients: usize, units: Vec<Vec<usize>>) -> Self {
        let mut unit_of = vec![None; gradients];
        for (unit, members) in units.iter().enumerate() {
            for &i in members {
                assert!(unit_of[i].is_none(), "gradient {i} is in two units");
                unit_of[i] = Some(unit);
            }
        }
        let mut pipeline =
            Self { missing: vec![0; units.len()], here: vec![false; gradients], units, unit_of, next: 0 };
        pipeline.begin();
        pipeline
    }

    /// A pass begins: no gradient is there, and no unit was started.
    pub fn begin(&mut self) {
        self.here.fill(false);
        for (missing, members) in self.missing.iter_mut().zip(&self.units) {
            *missing = members.len();
        }
        self.next = 0;
    }

    /// Gradient `i` is there; perhaps not for the first time.
    ///
    /// # Panics
    ///
    /// If there is no such gradient.
    pub fn arrive(&mut self, i: usize) -> Arrival {
        let Some(unit) = self.unit_of[i] else {
            self.here[i] = true;
            return Arrival::Elsewhere;
        };
        if unit < self.next {
            return Arrival::Late;
        }
        if !std::mem::replace(&mut self.here[i], true) {
            self.missing[unit] -= 1;
        }
        if self.next_full().is_some() { Arrival::Starts } else { Arrival::Waits }
    }

    /// The unit that starts next, if all of its gradients are there.
    pub fn next_full(&self) -> Option<usize> {
        (self.missing.get(self.next) == Some(&0)).then_some(self.next)
    }

    /// The next unit was started, complete or not; returns it. `None`: all were.
    pub fn start(&mut self) -> Option<usize> {
        let unit = self.next;
        (unit < self.units.len()).then(|| {
            self.next += 1;
            unit
        })
    }

    /// How many units were started.
    pub fn started(&self) -> usize {
        self.next
    }

    /// The places in a unit of the gradients that are not there.
    pub fn missing(&self, unit: usize) -> Vec<usize> {
        let members = self.units.get(unit).map_or(&[][..], |members| members);
        (0..members.len()).filter(|&k| !self.here[members[k]]).collect()
    }

    /// The gradients that are there, of units or not.
    pub fn here(&self) -> impl Iterator<Item = usize> {
        self.here.iter().enumerate().filter_map(|(i, &here)| here.then_some(i))
    }
}

/// Divides gradients into units: each takes gradients of one kind (a dtype), in the order of `gradients`, until it has `full`
/// bytes. The first unit needs `first` only, so that communication starts early. Units come in the order in which they fill.
///
/// `gradients`: kind and bytes of each, in the order in which they are expected. The units have places in that list.
pub fn assign(gradients: &[(usize, usize)], first: usize, full: usize) -> Vec<Vec<usize>> {
    let mut units: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<(usize, usize, Vec<usize>)> = Vec::new();
    for (i, &(kind, bytes)) in gradients.iter().enumerate() {
        let at = open.iter().position(|unit| unit.0 == kind).unwrap_or_else(|| {
            open.push((kind, 0, Vec::new()));
            open.len() - 1
        });
        open[at].1 += bytes;
        open[at].2.push(i);
        let limit = if units.is_empty() { first.min(full) } else { full };
        if open[at].1 >= limit {
            units.push(open.swap_remove(at).2);
        }
    }
    let mut rest: Vec<Vec<usize>> = open.into_iter().map(|unit| unit.2).collect();
    rest.sort_by_key(|unit| unit.last().copied());
    units.extend(rest);
    units
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Gradients in any order, some twice and some never; units are started as soon as they can be, and at the end.
    fn run(gradients: usize, units: &[Vec<usize>], arrivals: &[usize]) -> Vec<(usize, Vec<usize>)> {
        let mut pipeline = Pipeline::new(gradients, units.to_vec());
        let mut started = Vec::new();
        let mut there = vec![false; gradients];
        for &i in arrivals {
            let unit = units.iter().position(|members| members.contains(&i));
            let late = unit.is_some_and(|unit| started.iter().any(|&(other, _)| other == unit));
            let arrival = pipeline.arrive(i);
            there[i] |= !late;
            match unit {
                None => assert_eq!(arrival, Arrival::Elsewhere),
                Some(_) => assert_eq!(arrival == Arrival::Late, late),
            }
            while let Some(unit) = pipeline.next_full() {
                assert!(units[unit].iter().all(|&i| there[i]), "unit {unit} lacks gradients");
                started.push((pipeline.start().unwrap(), Vec::new()));
            }
        }
        while pipeline.started() < units.len() {
            let missing = pipeline.missing(pipeline.started());
            let unit = pipeline.start().unwrap();
            assert!(missing.iter().all(|&k| !there[units[unit][k]]));
            started.push((unit, missing));
        }
        assert_eq!(pipeline.start(), None);
        started
    }

    proptest! {
        #[test]
        fn units_start_in_their_order_and_complete(
            members in proptest::collection::vec(0..5usize, 1..24),
            arrivals in proptest::collection::vec(0..24usize, 0..60),
        ) {
            // Unit 4 stands for none.
            let units: Vec<Vec<usize>> =
                (0..4).map(|u| (0..members.len()).filter(|&i| members[i] == u).collect()).collect();
            let arrivals: Vec<usize> = arrivals.into_iter().filter(|&i| i < members.len()).collect();
            let started = run(members.len(), &units, &arrivals);
            prop_assert_eq!(started.iter().map(|unit| unit.0).collect::<Vec<_>>(), vec![0, 1, 2, 3]);
            // Without what never came, a unit is complete.
            for (unit, missing) in started {
                let never: Vec<usize> =
                    (0..units[unit].len()).filter(|&k| !arrivals.contains(&units[unit][k])).collect();
                prop_assert_eq!(missing, never);
            }
        }

        #[test]
        fn each_gradient_has_one_unit_of_its_kind(
            gradients in proptest::collection::vec((0..3usize, 0..50usize), 0..40),
            first in 1..80usize,
            full in 1..120usize,
        ) {
            let units = assign(&gradients, first, full);
            let mut all: Vec<usize> = units.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..gradients.len()).collect::<Vec<_>>());
            let kinds = |unit: &Vec<usize>| unit.iter().map(|&i| gradients[i].0).collect::<Vec<_>>();
            let size = |unit: &[usize]| unit.iter().map(|&i| gradients[i].1).sum::<usize>();
            let mut open = 0;
            for (n, unit) in units.iter().enumerate() {
                prop_assert!(!unit.is_empty() && kinds(unit).windows(2).all(|pair| pair[0] == pair[1]));
                prop_assert!(unit.is_sorted());
                let limit = if n == 0 { first.min(full) } else { full };
                // Full without waste: its last gradient has filled it. At most one of each kind is not full.
                if size(unit) >= limit && open == 0 {
                    prop_assert!(size(&unit[..unit.len() - 1]) < limit.max(full));
                } else {
                    open += 1;
                }
            }
            prop_assert!(open <= 3);
        }
    }

    #[test]
    fn a_pass_after_another_begins_anew() {
        let mut pipeline = Pipeline::new(3, vec![vec![2], vec![0, 1]]);
        assert_eq!(pipeline.arrive(0), Arrival::Waits);
        assert_eq!(pipeline.arrive(2), Arrival::Starts);
        assert_eq!(pipeline.start(), Some(0));
        assert_eq!((pipeline.missing(1), pipeline.here().collect::<Vec<_>>()), (vec![1], vec![0, 2]));
        pipeline.begin();
        assert_eq!((pipeline.started(), pipeline.missing(1), pipeline.here().count()), (0, vec![0, 1], 0));
    }

    #[test]
    fn the_first_unit_is_small() {
        let alike = [(0, 10), (0, 10), (0, 10), (1, 10), (0, 10)];
        assert_eq!(assign(&alike, 10, 20), [vec![0], vec![1, 2], vec![3], vec![4]]);
        assert_eq!(assign(&alike, 100, 20), [vec![0, 1], vec![2, 4], vec![3]]);
    }
}
