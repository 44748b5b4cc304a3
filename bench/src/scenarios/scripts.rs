//! Files as tasks: the speed, latency and memory of JavaScript and Python in our hosts, compared with Node's worker,
//! which runs JavaScript in its own process.

use super::drain::{drain, microseconds};
use super::latency::{self, Turn};
use super::{Bench, bars, figures, header, jobs_per_second, median};
use crate::Failure;
use crate::child::{Child, Outcome};
use crate::contestant::{Contestant, NODE};
use crate::figures::{count, megabytes, short, times};
use crate::report::{Goal, Section};
use crate::usage;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

const DRAINING: [Contestant; 3] = [Contestant::OursWithJavaScript, Contestant::NodeTuned, Contestant::OursWithPython];
const WAITING: [Contestant; 3] = [Contestant::OursWithJavaScript, Contestant::NodeDefault, Contestant::NodeTuned];
const IDLE: [Contestant; 2] = [Contestant::OursWithJavaScript, Contestant::NodeTuned];

const JOBS: u64 = 200_000;

/// How long a process is idle after its start before its memory is read.
const REST: Duration = Duration::from_secs(2);

/// Megabytes of an idle worker and of its child processes.
struct Idle {
    worker: f64,
    hosts: Vec<f64>,
    /// Other processes that run for the hosts.
    beside: f64,
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let drained = drain(bench, "scripts, drain", &DRAINING, 1, bench.size(JOBS)).await?;
    let api = latency::through_api(bench, "scripts, latency, API", &WAITING).await?;
    let sql = latency::through_sql(bench, "scripts, latency, SQL", &WAITING).await?;
    let idle = bench.alternate("scripts, idle", &IDLE, async |contestant| idle(bench, contestant).await).await?;
    let mut bare = Vec::new();
    for _ in 0..bench.rounds {
        bare.push(bare_node().await?);
    }

    let mut rows: Vec<Vec<String>> = Vec::new();
    rows.extend(drained.iter().map(|(contestant, turns)| drain_row(*contestant, turns)));
    for (way, results) in [("API", &api), ("SQL", &sql)] {
        for (contestant, turns) in results {
            let (p50, p99) = (figures(turns, |turn| turn.median), figures(turns, |turn| turn.p99));
            rows.push(row(contestant.label(), &format!("latency through {way}, p50 ms"), p50.with_spread(short)));
            rows.push(row(contestant.label(), &format!("latency through {way}, p99 ms"), p99.with_spread(short)));
        }
    }
    for (contestant, turns) in &idle {
        let worker = figures(turns, |idle| idle.worker);
        rows.push(row(contestant.label(), "idle: the worker, MB", worker.with_spread(short)));
        if turns.iter().any(|idle| !idle.hosts.is_empty()) {
            let hosts = figures(turns, |idle| idle.hosts.iter().sum());
            let beside = figures(turns, |idle| idle.beside);
            rows.push(row(contestant.label(), "idle: its hosts, MB", hosts.with_spread(short)));
            rows.push(row(contestant.label(), "idle: the shell beside the host, MB", beside.with_spread(short)));
        }
    }
    rows.push(row("node, without a program", "idle, MB", figures(&bare, |bytes| *bytes).with_spread(short)));

    let speed = |contestant| median(&drained, contestant, jobs_per_second);
    let most_hosts = idle.iter().flat_map(|(_, turns)| turns).map(|idle| idle.hosts.len()).max().unwrap_or(0);
    Ok(Section {
        title: "JavaScript and Python files".to_owned(),
        method: "Our worker with a folder of files and concurrency 24, compared with Node's worker with 24 jobs at \
                 a time and the same functions in its own process; the same Node runs both. Drain and latency are \
                 measured as above; the client's CPU time includes that of the hosts. Idle: the resident set \
                 (VmRSS) two seconds after the start."
            .to_owned(),
        header: header(&["", "measured", "figure", "PostgreSQL µs/job", "client µs/job"]),
        rows,
        plots: vec![bars(
            "scripts",
            "Drain, files as tasks, one process",
            "jobs per second",
            &drained,
            jobs_per_second,
        )],
        goals: vec![
            Goal::at_least(
                "JavaScript files: drain, of Node tuned",
                1.5,
                speed(Contestant::OursWithJavaScript) / speed(Contestant::NodeTuned),
                times,
            ),
            latency_goal("API", &api),
            latency_goal("SQL", &sql),
            Goal::at_least("Python files: drain, jobs/s", 10_000.0, speed(Contestant::OursWithPython), count),
            Goal::at_most("JavaScript files: hosts of an idle worker", 1.0, most_hosts as f64, count),
        ],
        ..Section::default()
    })
}

async fn idle(bench: &Bench, contestant: Contestant) -> Result<(Idle, String), Failure> {
    let database = bench.server.fresh_database(contestant).await?;
    let mut worker = Child::start(contestant, "latency_sql", &database.url, 0).await?;
    worker.send_line("go").await?;
    tokio::time::sleep(REST).await;
    let hosts = usage::children(worker.pid())?;
    let mut idle = Idle { worker: resident(worker.pid())?, hosts: Vec::new(), beside: 0.0 };
    for host in hosts {
        idle.hosts.push(resident(host)?);
        for other in usage::group(host)?.into_iter().filter(|other| *other != host) {
            idle.beside += resident(other)?;
        }
    }
    worker.send_line("stop").await?;
    worker.figures().await?;
    worker.end().await?;
    let summary =
        format!("{} MB, {} hosts of {} MB", short(idle.worker), idle.hosts.len(), short(idle.hosts.iter().sum()));
    Ok((idle, summary))
}

/// Megabytes of a Node process that does nothing.
async fn bare_node() -> Result<f64, Failure> {
    let mut node = Command::new(&*NODE)
        .args(["-e", "console.log('ready'); process.stdin.resume();"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let output = node.stdout.take().ok_or("a child has an output")?;
    BufReader::new(output).lines().next_line().await?;
    tokio::time::sleep(REST).await;
    let megabytes = resident(node.id().ok_or("a child has a process id")?)?;
    drop(node.stdin.take());
    node.wait().await?;
    Ok(megabytes)
}

fn resident(pid: u32) -> Result<f64, Failure> {
    Ok(megabytes(usage::memory(pid)? as f64))
}

fn drain_row(contestant: Contestant, turns: &[Outcome]) -> Vec<String> {
    vec![
        contestant.label().to_owned(),
        "drain, jobs/s".to_owned(),
        figures(turns, jobs_per_second).with_spread(count),
        short(figures(turns, |outcome| microseconds(outcome.server, outcome)).median()),
        short(figures(turns, |outcome| microseconds(outcome.client, outcome)).median()),
    ]
}

fn row(who: &str, what: &str, figure: String) -> Vec<String> {
    vec![who.to_owned(), what.to_owned(), figure, String::new(), String::new()]
}

/// Goal relative to the better settings of Node.
fn latency_goal(way: &str, results: &latency::Results) -> Goal {
    let p50 = |contestant| median(results, contestant, |turn: &Turn| turn.median);
    let of_node = p50(Contestant::NodeDefault).min(p50(Contestant::NodeTuned));
    let ratio = p50(Contestant::OursWithJavaScript) / of_node;
    Goal::at_most(&format!("JavaScript files: latency through {way}, p50: of Node's best"), 1.0, ratio, short)
}
