//! How soon an idle worker claims after a notification of new jobs. No I/O.
//!
//! Every listening worker hears of every job. If 64 idle workers claim the same job at the same moment, the claims keep
//! each other from the processor, and the job starts late. So the workers take an order from the notification, which is
//! another one each time. The first few claims are at once; the others follow one after the other, and find nothing if the
//! job is gone. No notification is ignored, so no job waits for a worker that is busy, stopped, or has other tasks.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// How many workers claim at once for each new job. Some of them may be busy or have other tasks.
const AT_ONCE: f64 = 8.0;

/// The time between two later workers: what a claim that finds nothing takes of a processor, and some more.
const INTERVAL: Duration = Duration::from_micros(150);

/// The longest delay.
const LONGEST: Duration = Duration::from_millis(10);

/// How long a worker waits with its claim after this notification, in a fleet of this size.
pub(crate) fn delay(notification: &str, worker_id: &str, fleet: u32) -> Duration {
    let mut hasher = DefaultHasher::new();
    (notification, worker_id).hash(&mut hasher);
    let place = hasher.finish() as f64 / u64::MAX as f64 * f64::from(fleet);
    INTERVAL.mul_f64((place / jobs(notification) - AT_ONCE).max(0.0)).min(LONGEST)
}

/// How many jobs were added.
fn jobs(notification: &str) -> f64 {
    let count = serde_json::from_str::<serde_json::Value>(notification).ok();
    count.and_then(|notification| notification.get("count")?.as_f64()).unwrap_or(1.0).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(notification: &str, fleet: u32) -> Vec<Duration> {
        let mut delays: Vec<Duration> =
            (0..fleet).map(|worker| delay(notification, &format!("rs-{worker}"), fleet)).collect();
        delays.sort();
        delays
    }

    #[test]
    fn the_workers_of_a_small_fleet_claim_at_once() {
        assert_eq!(delays(r#"{"r":0.5,"count":1}"#, 8), [Duration::ZERO; 8]);
    }

    #[test]
    fn in_a_large_fleet_some_claim_at_once_and_all_soon() {
        for r in 0..100 {
            let delays = delays(&format!(r#"{{"r":0.{r},"count":1}}"#), 64);
            assert!(delays[0] < Duration::from_millis(1), "{delays:?}");
            assert!(delays[48] > Duration::from_millis(1), "{delays:?}");
            assert!(delays[63] < Duration::from_millis(9), "{delays:?}");
        }
        assert_eq!(delays("{\"r\":0.1}", 10_000).last(), Some(&LONGEST));
    }

    #[test]
    fn more_workers_claim_at_once_if_more_jobs_were_added() {
        assert_eq!(delays(r#"{"r":0.5,"count":64}"#, 64), [Duration::ZERO; 64]);
        assert_eq!(delay("not JSON", "w", 5), Duration::ZERO);
    }

    #[test]
    fn the_order_is_another_one_each_time() {
        let at_once = |r: u32| delay(&format!(r#"{{"r":0.{r},"count":1}}"#), "rs-1", 64).is_zero();
        let times = (0..1000).filter(|r| at_once(*r)).count();
        assert!((80..170).contains(&times), "{times} of 1000");
    }
}
