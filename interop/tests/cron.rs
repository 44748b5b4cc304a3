//! Workers of both kinds with one crontab: each tick is added once among them all, and what was missed is made up for
//! once, whichever starts first. Time is simulated on both sides.

#![allow(missing_docs)]

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use graphile_worker::{
    CronJobBackfilled, CronJobScheduled, CronTick, Crontab, CrontabJobKeyMode, Error, TestClock, Worker, WorkerOptions,
    parse_crontab,
};
use graphile_worker_interop::{Db, patiently};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Releases that know the level of the contract.
const CURRENT: [&str; 2] = ["graphile-worker", "graphile-worker-0.17"];

const CRONTAB: &str = "\
* 3 * * * minutely
*/20 * * * * often ?fill=3h {every: 'twenty minutes'}
0 * * * * hourly ?id=on_the_hour&fill=2d
5 0,12 * * * hourly ?id=and_twice_a_day&fill=13h
30 4 * * * reports/daily ?fill=1w&queue=reports&priority=-3&max=7 {to: ['ops', 'sales'], share: 0.25, _cron: 'no'}
0 */4 * * * refresh ?fill=1d&jobKey=refresh&priority=5 {full: true}
10 */6 * * * digest ?fill=1d&queue=reports&jobKey=digest%20%26%20co&jobKeyMode=preserve_run_at
15 6 1 * 1 first_or_monday ?fill=1w
0 12 * * 0,6 weekend
40 5,17 */2 * * every_other_day ?queue=reports
0 0 1 * * monthly ?fill=4w&max=1
0 0 29 2 * leap_day ?fill=4w
";

/// A Friday evening; three days later it is another month, and a Monday.
const BEGIN: &str = "2026-02-27T22:30:30Z";

fn time(text: &str) -> DateTime<Utc> {
    text.parse().expect("a time")
}

/// One of our workers with a clock of its own, which runs no jobs.
struct Ours {
    worker: Arc<Worker>,
    running: JoinHandle<Result<(), Error>>,
    clock: TestClock,
    looks: mpsc::UnboundedReceiver<DateTime<Utc>>,
    /// How many jobs it has added.
    added: Arc<AtomicUsize>,
}

impl Ours {
    async fn start(db: &Db, crontab: &str, now: DateTime<Utc>) -> Ours {
        let clock = TestClock::at(now);
        let (sender, looks) = mpsc::unbounded_channel();
        let added = Arc::new(AtomicUsize::new(0));
        let (scheduled, backfilled) = (added.clone(), added.clone());
        let options = WorkerOptions::default()
            .pg_pool(db.pool.clone())
            .listen_os_shutdown_signals(false)
            .cron_clock(&clock)
            .with_cron(crontab)
            .expect("a crontab")
            .on(CronTick, move |tick| {
                // The receiver is gone when the test is over.
                let _ = sender.send(tick.at);
                async {}
            })
            .on(CronJobScheduled, move |_| {
                scheduled.fetch_add(1, Ordering::SeqCst);
                async {}
            })
            .on(CronJobBackfilled, move |_| {
                backfilled.fetch_add(1, Ordering::SeqCst);
                async {}
            });
        let worker = Arc::new(patiently("our worker to start", options.init()).await.expect("a worker"));
        let running = tokio::spawn({
            let worker = worker.clone();
            async move { worker.run().await }
        });
        Ours { worker, running, clock, looks, added }
    }

    /// Waits until everything that is due at the time its clock shows is added.
    async fn done(&mut self) {
        let now = self.clock.now();
        let looked = async { while self.looks.recv().await.expect("our worker runs") != now {} };
        patiently(&format!("our worker to be done with {now}"), looked).await;
    }

    fn added(&self) -> usize {
        self.added.load(Ordering::SeqCst)
    }

    async fn stop(self) {
        self.worker.request_shutdown();
        patiently("our worker to stop", self.running).await.expect("our worker").expect("our worker");
    }
}

fn tell(ours: &[Ours], now: DateTime<Utc>) {
    for worker in ours {
        worker.clock.set(now);
    }
}

async fn done(ours: &mut [Ours]) {
    for worker in ours {
        worker.done().await;
    }
}

/// When an item was due, and whether that was made up for.
type Tick = (DateTime<Utc>, bool);

/// What has to be in the database, by what the crontab says and when there was a worker.
struct Expected {
    known_since: DateTime<Utc>,
    items: Vec<(Crontab, Vec<Tick>)>,
}

impl Expected {
    fn since(known_since: DateTime<Utc>, crontab: &str) -> Expected {
        let items = parse_crontab(crontab).expect("a crontab");
        Expected { known_since, items: items.into_iter().map(|item| (item, Vec::new())).collect() }
    }

    /// There was a worker from then until then.
    fn ran(&mut self, from: DateTime<Utc>, until: DateTime<Utc>) {
        for (item, ticks) in &mut self.items {
            let filled = from - item.options.fill.map(|fill| fill.as_duration()).unwrap_or_default();
            let before = filled.max(self.known_since) - TimeDelta::milliseconds(1);
            let before = ticks.last().map_or(before, |(last, _)| before.max(*last));
            ticks.extend(item.fire_times(before).take_while(|at| *at <= until).map(|at| (at, at < from)));
        }
    }

    fn ticks(&self) -> usize {
        self.items.iter().map(|(_, ticks)| ticks.len()).sum()
    }

    fn jobs(&self) -> Vec<Value> {
        let mut jobs = Vec::new();
        for (item, ticks) in &self.items {
            let newest = ticks.len().saturating_sub(1);
            for (nth, (at, backfilled)) in ticks.iter().enumerate() {
                // With a key there is one job, changed by each tick.
                let has_key = item.options.job_key.is_some();
                if has_key && nth < newest {
                    continue;
                }
                let keeps_time = item.options.job_key_mode == Some(CrontabJobKeyMode::PreserveRunAt);
                let run_at = if keeps_time { ticks[0].0 } else { *at };
                let mut payload: Map<String, Value> = item.payload.clone().unwrap_or_default();
                let ts = at.to_rfc3339_opts(SecondsFormat::Millis, true);
                payload.insert("_cron".to_owned(), json!({"ts": ts, "backfilled": backfilled}));
                jobs.push(json!({
                    "task": item.task_identifier,
                    "run_at": run_at.format("%Y-%m-%dT%H:%M:%S+00:00").to_string(),
                    "payload": payload,
                    "queue": item.options.queue,
                    "priority": item.options.priority.unwrap_or(0),
                    "max_attempts": item.options.max_attempts.unwrap_or(25),
                    "key": item.options.job_key,
                    "revision": if has_key { newest } else { 0 },
                    "attempts": 0, "flags": null, "is_available": true, "last_error": null, "locked_at": null,
                    "locked_by": null,
                }));
            }
        }
        jobs.sort_by_cached_key(Value::to_string);
        jobs
    }

    fn known(&self) -> Value {
        let text = |at: DateTime<Utc>| json!(at.format("%Y-%m-%dT%H:%M:%S+00:00").to_string());
        let known = self.items.iter().map(|(item, ticks)| {
            let last = ticks.last().map_or(Value::Null, |(last, _)| text(*last));
            (item.identifier().to_owned(), json!([text(self.known_since), last]))
        });
        Value::Object(known.collect())
    }

    /// Nothing is missing from the database, and nothing else is there, whichever kind of worker has added it.
    async fn is_there(&self, db: &Db, when: &str) {
        let there = db
            .value(
                "select coalesce(jsonb_agg(
                   to_jsonb(jobs) - '{id,task_id,job_queue_id,created_at,updated_at}'::text[]
                   || jsonb_build_object('task', tasks.identifier, 'queue', queues.queue_name)), '[]')
                 from graphile_worker._private_jobs as jobs
                 join graphile_worker._private_tasks as tasks on tasks.id = jobs.task_id
                 left join graphile_worker._private_job_queues as queues on queues.id = jobs.job_queue_id",
            )
            .await;
        let mut there = there.as_array().expect("jobs").clone();
        there.sort_by_cached_key(Value::to_string);
        let wanted = self.jobs();
        if there != wanted {
            let missing: Vec<_> = wanted.iter().filter(|job| !there.contains(job)).collect();
            let more: Vec<_> = there.iter().filter(|job| !wanted.contains(job)).collect();
            let (found, expected) = (there.len(), wanted.len());
            panic!("{when}: {found} jobs, expected {expected}\nmissing: {missing:#?}\nnot expected: {more:#?}");
        }
        let known = "select json_object_agg(identifier, json_build_array(known_since, last_execution))
                     from graphile_worker._private_known_crontabs";
        assert_eq!(db.value(known).await, self.known(), "{when}");
    }
}

/// The minutes after `after` up to `until` in which anything is due.
fn due(after: DateTime<Utc>, until: DateTime<Utc>) -> Vec<DateTime<Utc>> {
    let items = parse_crontab(CRONTAB).expect("a crontab");
    let next = |after: DateTime<Utc>| items.iter().filter_map(|item| item.next_after(after)).min();
    std::iter::successors(next(after), |at| next(*at)).take_while(|at| *at <= until).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mixed_fleet_adds_each_tick_once() {
    for package in CURRENT {
        let db = Db::ours().await;
        let begin = time(BEGIN);
        let mut expected = Expected::since(begin, CRONTAB);
        let mut node = db.node_keeps_time(package, CRONTAB, begin);
        let mut ours = [Ours::start(&db, CRONTAB, begin).await, Ours::start(&db, CRONTAB, begin).await];
        done(&mut ours).await;
        node.done().await;

        let mut now = begin;
        for (nth, minute) in due(begin, begin + TimeDelta::days(3)).into_iter().enumerate() {
            // As it begins, or somewhat later.
            now = minute + TimeDelta::seconds([0, 1, 40][nth % 3]);
            ours.swap(0, 1);
            match nth % 5 {
                0 => {
                    node.set(now);
                    node.done().await;
                    tell(&ours, now);
                    done(&mut ours).await;
                }
                1 => {
                    tell(&ours, now);
                    done(&mut ours).await;
                    node.set(now);
                    node.done().await;
                }
                // At the same time, as it mostly is.
                order => {
                    if order == 2 {
                        tell(&ours, now);
                    }
                    node.set(now);
                    if order != 2 {
                        tell(&ours, now);
                    }
                    done(&mut ours).await;
                    node.done().await;
                }
            }
        }
        expected.ran(begin, now);
        expected.is_there(&db, package).await;
        let by_ours: Vec<usize> = ours.iter().map(Ours::added).collect();
        let total = by_ours.iter().sum::<usize>();
        assert!((1..expected.ticks()).contains(&total), "{package}: {by_ours:?} of {}", expected.ticks());

        node.stop().await;
        for worker in ours {
            worker.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_that_both_kinds_of_workers_missed_are_added_once() {
    for package in CURRENT {
        let db = Db::ours().await;
        let mut expected = Expected::since(time(BEGIN), CRONTAB);
        // Each runs alone, with about a day between them. Some start in a minute in which much is due.
        let absences = [
            ("ours", BEGIN, "2026-02-28T04:00:00Z"),
            ("node", "2026-03-01T04:30:00Z", "2026-03-01T06:20:10Z"),
            ("ours", "2026-03-02T12:00:00Z", "2026-03-02T12:20:00Z"),
            ("node", "2026-03-03T13:04:59Z", "2026-03-03T13:20:00Z"),
            ("ours", "2026-03-04T16:10:20Z", "2026-03-04T16:20:00Z"),
            ("node", "2026-03-04T16:20:00Z", "2026-03-04T16:20:00Z"),
            ("ours", "2026-03-04T16:20:30Z", "2026-03-04T16:40:00Z"),
        ];
        for (who, from, until) in absences {
            let (from, until) = (time(from), time(until));
            let minutes = due(from, until);
            if who == "node" {
                let mut node = db.node_keeps_time(package, CRONTAB, from);
                node.done().await;
                for minute in minutes {
                    node.set(minute);
                    node.done().await;
                }
                node.stop().await;
            } else {
                let mut ours = Ours::start(&db, CRONTAB, from).await;
                ours.done().await;
                for minute in minutes {
                    ours.clock.set(minute);
                    ours.done().await;
                }
                ours.stop().await;
            }
            expected.ran(from, until);
            expected.is_there(&db, &format!("{package}: {who} from {from} until {until}")).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_catch_up_at_the_same_time_do_not_lock_each_other_out() {
    // In a minute in which both are due, the one that was due before comes last.
    let crontab = "*/2 * * * * every_other ?fill=1d\n* * * * * every ?fill=1d";
    let db = Db::ours().await;
    let mut now = time(BEGIN);
    let mut expected = Expected::since(now, crontab);
    for round in 0..4 {
        let begin = now;
        let count = async || db.value("select count(*) from graphile_worker._private_jobs").await;
        let before = count().await;
        // It ends with an error if it was chosen to give way.
        let mut node = db.node_keeps_time("graphile-worker", crontab, begin);
        // After an absence, Node has begun to make up for it when ours begin.
        let begun = async { while round > 0 && count().await == before {} };
        patiently("Node's worker to begin", begun).await;
        let mut ours = [Ours::start(&db, crontab, begin).await, Ours::start(&db, crontab, begin).await];
        done(&mut ours).await;
        node.done().await;
        for nth in 0..60 {
            now += TimeDelta::minutes(4);
            ours.swap(0, 1);
            let (first, later) = ours.split_at(nth % 3);
            tell(first, now);
            node.set(now);
            tell(later, now);
            done(&mut ours).await;
            node.done().await;
        }
        node.stop().await;
        for worker in ours {
            worker.stop().await;
        }
        expected.ran(begin, now);
        expected.is_there(&db, &format!("round {round}")).await;
        now += TimeDelta::hours(6);
    }
}
