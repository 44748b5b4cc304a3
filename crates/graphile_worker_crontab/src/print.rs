//! Prints an item as a crontab line that `parse` parses into the same item.

use crate::crontab::Crontab;
use crate::options::CrontabOptions;
use crate::query::encode;
use serde_json::{Map, Value};
use std::fmt;

impl fmt::Display for Crontab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.schedule, self.task_identifier)?;
        print_options(&self.options, f)?;
        match &self.payload {
            Some(payload) => write!(f, " {}", in_one_line(payload)),
            None => Ok(()),
        }
    }
}

fn print_options(options: &CrontabOptions, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let CrontabOptions { id, fill, fill_limit, max_attempts, queue, priority, job_key, job_key_mode, tz } = options;
    let pairs: [(&str, Option<String>); 9] = [
        ("id", id.clone()),
        ("fill", fill.map(|fill| fill.to_string())),
        ("fillLimit", fill_limit.map(|limit| limit.to_string())),
        ("max", max_attempts.map(|max| max.to_string())),
        ("queue", queue.clone()),
        ("priority", priority.map(|priority| priority.to_string())),
        ("jobKey", job_key.clone()),
        ("jobKeyMode", job_key_mode.map(|mode| mode.as_str().to_owned())),
        ("tz", tz.map(|zone| zone.name().to_owned())),
    ];
    let set = pairs.iter().filter_map(|(key, value)| Some((key, value.as_ref()?)));
    set.enumerate()
        .try_for_each(|(nth, (key, value))| write!(f, "{}{key}={}", if nth == 0 { " ?" } else { "&" }, encode(value)))
}

/// JSON, with the two line terminators escaped that JSON allows in strings.
fn in_one_line(payload: &Map<String, Value>) -> String {
    let json = Value::Object(payload.clone()).to_string();
    json.replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}
