//! What chat templates expect beside Jinja itself: the functions and the JSON of the Python library that they were
//! written for.

use std::fmt;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use tidemill_core::{Clock, SystemClock, Timestamp};

const JSON_DEPTH_MAX: usize = 64;
const JSON_INDENT_MAX: usize = 16;
const FORMAT_DIGITS_MAX: usize = 4;

/// The text that a template raised on purpose, for the client.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(call_python_method);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
}

/// Methods that Python's strings, lists and dicts have.
fn call_python_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if method == "format" && value.as_str().is_some_and(asks_for_width) {
        let problem = format!("format: a width of {FORMAT_DIGITS_MAX} digits or more");
        return Err(failure(problem));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}

/// True for a format with a number so long that, as a width, it would fill the memory.
fn asks_for_width(format: &str) -> bool {
    let mut runs = format.split(|c: char| !c.is_ascii_digit());
    runs.any(|digits| digits.len() >= FORMAT_DIGITS_MAX)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    let error = Error::new(
        ErrorKind::InvalidOperation,
        "the template refuses the messages",
    );
    Err(error.with_source(Raised(message)))
}

/// The present in UTC.
fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(format, SystemClock::new().now())
}

fn strftime(format: &str, at: Timestamp) -> Result<String, Error> {
    let moment = Moment::new(at);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = chars.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = chars.next();
        }
        let written = directive
            .and_then(|directive| moment.write(directive))
            .ok_or_else(|| {
                failure(format!(
                    "strftime_now: {format:?} has a directive that is not supported"
                ))
            })?;
        let is_number = written.starts_with(|c: char| c.is_ascii_digit());
        match written.trim_start_matches('0') {
            "" if unpadded && is_number => text.push('0'),
            short if unpadded && is_number => text.push_str(short),
            _ => text.push_str(&written),
        }
    }
    Ok(text)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// A civil date and time of day, UTC.
struct Moment {
    year: u64,
    /// 0 to 11.
    month_idx: usize,
    day: u64,
    day_of_year: u64,
    weekday_idx: usize,
    second_of_day: u64,
}

impl Moment {
    fn new(at: Timestamp) -> Self {
        let seconds = at.0 / 1_000_000;
        let days = seconds / 86_400;
        let (mut year, mut day_idx) = (1970, days);
        while day_idx >= year_days(year) {
            day_idx -= year_days(year);
            year += 1;
        }
        let day_of_year = day_idx + 1;
        let mut month_idx = 0;
        while day_idx >= month_days(year, month_idx) {
            day_idx -= month_days(year, month_idx);
            month_idx += 1;
        }
        Self {
            year,
            month_idx,
            day: day_idx + 1,
            day_of_year,
            weekday_idx: ((days + 4) % 7) as usize,
            second_of_day: seconds % 86_400,
        }
    }

    fn write(&self, directive: char) -> Option<String> {
        let (hour, minute) = (self.second_of_day / 3600, self.second_of_day / 60 % 60);
        let month = self.month_idx + 1;
        let (month_name, weekday) = (MONTHS[self.month_idx], WEEKDAYS[self.weekday_idx]);
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{month:02}"),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{:02}", self.second_of_day % 60),
            'F' => format!("{}-{month:02}-{:02}", self.year, self.day),
            'T' => format!("{hour:02}:{minute:02}:{:02}", self.second_of_day % 60),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn year_days(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn month_days(year: u64, month_idx: usize) -> u64 {
    match month_idx {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// JSON as Python writes it: a space after comma and colon, no escapes for HTML or beyond ASCII.
fn to_json(
    state: &State<'_, '_>,
    value: &Value,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        None => options.get::<Option<usize>>("indent")?,
        given => given,
    };
    if options.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        return Err(failure(
            "tojson: ensure_ascii=true is not supported".to_owned(),
        ));
    }
    options.assert_all_used()?;
    let mut json = Json {
        state,
        indent: indent.map(|width| width.min(JSON_INDENT_MAX)),
        depth: 0,
        text: String::new(),
    };
    json.value(value)?;
    Ok(Value::from_safe_string(json.text))
}

struct Json<'a> {
    state: &'a State<'a, 'a>,
    indent: Option<usize>,
    depth: usize,
    text: String,
}

impl Json<'_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        // A few lines of a template build values whose text is endless: each part costs.
        self.state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self
                .text
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                self.list("[]", value, |json, item| json.value(&item))?;
            }
            ValueKind::Map => self.list("{}", value, |json, key| {
                json.string(&key.to_string())?;
                json.text.push_str(": ");
                json.value(&value.get_item(&key)?)
            })?,
            kind => return Err(failure(format!("tojson: {kind} has no JSON"))),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        self.state.consume_fuel(text.len() as u64 / 8)?;
        let quoted = serde_json::to_string(text).expect("a string is always JSON");
        self.text.push_str(&quoted);
        Ok(())
    }

    /// The parts of a list or map between `brackets`.
    fn list(
        &mut self,
        brackets: &str,
        value: &Value,
        mut write: impl FnMut(&mut Self, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.depth == JSON_DEPTH_MAX {
            return Err(failure(format!(
                "tojson: more than {JSON_DEPTH_MAX} levels"
            )));
        }
        self.depth += 1;
        self.text.push_str(&brackets[..1]);
        let mut is_empty = true;
        for item in value.try_iter()? {
            if !is_empty {
                self.text
                    .push_str(if self.indent.is_some() { "," } else { ", " });
            }
            is_empty = false;
            self.break_line();
            write(self, item)?;
        }
        self.depth -= 1;
        if !is_empty {
            self.break_line();
        }
        self.text.push_str(&brackets[1..]);
        Ok(())
    }

    fn break_line(&mut self) {
        if let Some(width) = self.indent {
            self.text.push('\n');
            self.text
                .extend(std::iter::repeat_n(' ', width * self.depth));
        }
    }
}

fn failure(problem: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

#[cfg(test)]
mod tests;
