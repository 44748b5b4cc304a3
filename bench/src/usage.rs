//! CPU time and memory of other processes, read from Linux's /proc.

use crate::Failure;
use std::fs;

/// /proc counts in hundredths of a second, whatever the kernel's own tick is.
const TICKS_PER_SECOND: f64 = 100.0;

/// The fields of /proc/PID/stat that we need.
struct Stat {
    parent: u32,
    group: u32,
    own: f64,
    ended_children: f64,
}

/// CPU seconds of a process and all its children, including those that have exited. If a child exits while we read, its
/// time moves to its parent, and we read again.
pub(crate) fn of_family(parent: u32) -> Result<f64, Failure> {
    loop {
        let itself = stat(parent)?;
        let children = of_living_children(parent)?;
        if stat(parent)?.ended_children == itself.ended_children {
            return Ok(itself.own + itself.ended_children + children);
        }
    }
}

fn of_living_children(parent: u32) -> Result<f64, Failure> {
    let children = living(|process| process.parent == parent)?;
    Ok(children.into_iter().map(|(_, child)| child.own + child.ended_children).sum())
}

fn living(which: impl Fn(&Stat) -> bool) -> Result<Vec<(u32, Stat)>, Failure> {
    let pids = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // A process may exit while we read.
    let stats = pids.filter_map(|pid| Some((pid, stat(pid).ok()?)));
    Ok(stats.filter(|(_, stat)| which(stat)).collect())
}

/// The running children of a process.
pub(crate) fn children(parent: u32) -> Result<Vec<u32>, Failure> {
    Ok(living(|process| process.parent == parent)?.into_iter().map(|(pid, _)| pid).collect())
}

/// The processes in the group of this leader.
pub(crate) fn group(leader: u32) -> Result<Vec<u32>, Failure> {
    Ok(living(|process| process.group == leader)?.into_iter().map(|(pid, _)| pid).collect())
}

pub(crate) fn parent(pid: u32) -> Result<u32, Failure> {
    Ok(stat(pid)?.parent)
}

/// Peak resident memory of a process, in bytes.
pub(crate) fn peak_memory(pid: u32) -> Result<u64, Failure> {
    bytes(pid, "VmHWM")
}

/// Current resident memory of a process, in bytes.
pub(crate) fn memory(pid: u32) -> Result<u64, Failure> {
    bytes(pid, "VmRSS")
}

fn bytes(pid: u32, name: &str) -> Result<u64, Failure> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kilobytes.ok_or_else(|| format!("/proc/{pid}/status has no {name} in kB"))? * 1024)
}

fn stat(pid: u32) -> Result<Stat, Failure> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse(&text).ok_or_else(|| format!("/proc/{pid}/stat is {text:?}, expected at least 17 fields").into())
}

/// The second field is the program's name in parentheses, which may itself contain spaces and parentheses.
fn parse(text: &str) -> Option<Stat> {
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let seconds = |field: usize| Some(fields.get(field)?.parse::<f64>().ok()? / TICKS_PER_SECOND);
    Some(Stat {
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        own: seconds(11)? + seconds(12)?,
        ended_children: seconds(13)? + seconds(14)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_move_the_fields() {
        let stat = parse("7 (a (b) c) S 3 7 7 0 -1 0 0 0 0 0 150 50 300 100 20 0").expect("valid");
        assert_eq!((stat.parent, stat.group, stat.own, stat.ended_children), (3, 7, 2.0, 4.0));
    }

    #[test]
    fn this_process_has_a_parent_and_memory() {
        let own = std::process::id();
        assert!(parent(own).expect("readable") > 0);
        assert!(peak_memory(own).expect("readable") > 1024);
    }

    #[test]
    fn a_process_that_was_started_is_a_child_and_has_memory() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("a child");
        let children = children(std::process::id()).expect("readable");
        assert!(children.contains(&child.id()), "{children:?}");
        assert!(memory(child.id()).expect("readable") > 1024);
        drop(child.stdin.take());
        child.wait().expect("exited");
    }
}
