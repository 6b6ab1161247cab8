//! What will happen, in the order of virtual time. Ties go in the order of scheduling, so that no history depends
//! on a hash.

use std::collections::BTreeMap;
use tidemill_core::Timestamp;

/// Future occurrences.
pub(crate) struct Schedule<T> {
    items: BTreeMap<(Timestamp, u64), T>,
    n_pushed: u64,
}

impl<T> Default for Schedule<T> {
    fn default() -> Self {
        Self {
            items: BTreeMap::new(),
            n_pushed: 0,
        }
    }
}

impl<T> Schedule<T> {
    /// Adds an occurrence.
    pub(crate) fn push(&mut self, at: Timestamp, item: T) {
        self.items.insert((at, self.n_pushed), item);
        self.n_pushed += 1;
    }

    /// Takes the next one out.
    pub(crate) fn pop(&mut self) -> Option<(Timestamp, T)> {
        self.items.pop_first().map(|((at, _), item)| (at, item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_orders_and_ties_keep_their_order() {
        let mut schedule = Schedule::default();
        schedule.push(Timestamp(2), 'c');
        schedule.push(Timestamp(1), 'a');
        schedule.push(Timestamp(1), 'b');
        let order: Vec<char> = std::iter::from_fn(|| schedule.pop())
            .map(|(_, x)| x)
            .collect();
        assert_eq!(order, ['a', 'b', 'c']);
    }
}
