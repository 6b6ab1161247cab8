//! A chat template, compiled so that no value in it can grow without end.
//!
//! The engine's fuel bounds steps and flat strings, but a list that holds another one twice, sixty times over, takes
//! sixty steps to build and would fill any memory when it is printed, compared or joined. So a check follows every
//! instruction that puts values together: what the result would take *written out in full* must stay within a bound
//! that grows with the request. The instructions are the engine's own and change with its version; the tests compare
//! results with the unchecked engine's.

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, eval, make_string_output, parse,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};

const NAME: &str = "chat_template";
/// Names of the checks; no template can spell them.
const CHECK: &str = "(within-bounds)";
const CHECK_STORED: &str = "(storable)";
/// The engine looks a filter with this number up each time.
const NO_LOCAL: u8 = u8::MAX;
const DEPTH_MAX: usize = 32;

/// What one rendering may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    /// Steps, and 64 bytes made or visited each.
    pub(super) fuel: u64,
    /// Bytes of any one value, written out.
    pub(super) value_bytes: usize,
}

/// Compiles and runs `source`. `environment` brings functions and filters; its budget is set here.
pub(super) fn render(
    mut environment: Environment<'_>,
    source: &str,
    arguments: Value,
    budget: Budget,
) -> Result<String, Error> {
    environment.set_fuel(Some(budget.fuel));
    let n_bytes_max = budget.value_bytes;
    environment.add_filter(CHECK, move |state: &State<'_, '_>, value: &Value| {
        Extent::new(state, n_bytes_max).check(value)
    });
    environment.add_filter(CHECK_STORED, storable);
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    let ast = parse(
        source,
        NAME,
        syntax.expect("the delimiters are the usual ones"),
    )?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&ast);
    let (instructions, blocks) = generator.finish();
    let instructions = with_checks(&instructions);
    let blocks = blocks
        .iter()
        .map(|(name, block)| (*name, with_checks(block)))
        .collect();
    let mut rendered = String::new();
    let mut output = make_string_output(&mut rendered);
    eval(
        &environment,
        &instructions,
        arguments,
        &blocks,
        &mut output,
        AutoEscape::None,
    )?;
    Ok(rendered)
}

/// `[value, namespace]`, the other way round: unpacking puts the first item on top.
fn storable(parts: Vec<Value>) -> Result<Value, Error> {
    let [value, namespace] = parts.as_slice() else {
        return Err(failure("an assignment takes a value and a namespace"));
    };
    if is_namespace(value) {
        return Err(failure("a namespace cannot be stored in another one"));
    }
    Ok(Value::from(vec![namespace.clone(), value.clone()]))
}

/// The same program with a check after each instruction that puts values together.
fn with_checks<'s>(program: &Instructions<'s>) -> Instructions<'s> {
    let old = || (0..).map_while(|idx| program.get(idx).map(|instruction| (idx, instruction)));
    // Where each instruction goes, so that jumps arrive at the same one. A jump never lands between an instruction
    // and its check, and one past the end stays past the end.
    let mut places = Vec::new();
    let mut next = 0_u32;
    for (_, instruction) in old() {
        let (n_before, n_after) = checks(instruction);
        places.push(next);
        next += n_before + 1 + n_after;
    }
    places.push(next);

    let mut checked = Instructions::new(program.name(), program.source());
    for (idx, instruction) in old() {
        let mut add =
            |instruction: Instruction<'s>| match (program.get_span(idx), program.get_line(idx)) {
                (Some(span), _) => checked.add_with_span(instruction, span),
                (None, Some(line)) => {
                    checked.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX))
                }
                (None, None) => checked.add(instruction),
            };
        if let Instruction::SetAttr(_) = instruction {
            // The namespace lies on the value that it is to hold: the check gets both, and gives both back.
            add(Instruction::BuildList(Some(2)));
            add(Instruction::ApplyFilter(CHECK_STORED, Some(1), NO_LOCAL));
            add(Instruction::UnpackList(2));
        }
        add(moved(instruction, &places));
        if checks(instruction).1 == 1 {
            add(Instruction::ApplyFilter(CHECK, Some(1), NO_LOCAL));
        }
    }
    checked
}

/// The instruction with its jump target, if any, at the new place.
fn moved<'s>(instruction: &Instruction<'s>, places: &[u32]) -> Instruction<'s> {
    let mut moved = instruction.clone();
    if let Instruction::Iterate(target)
    | Instruction::Jump(target)
    | Instruction::JumpIfFalse(target)
    | Instruction::JumpIfFalseOrPop(target)
    | Instruction::JumpIfTrueOrPop(target)
    | Instruction::BuildMacro(_, target, _) = &mut moved
    {
        *target = places[*target as usize];
    }
    moved
}

/// How many instructions go before and after this one.
fn checks(instruction: &Instruction<'_>) -> (u32, u32) {
    use Instruction::*;
    match instruction {
        SetAttr(_) => (3, 0),
        BuildMap(_) | BuildList(_) | BuildTuple(_) | Add | Mul | StringConcat | ApplyFilter(..)
        | CallFunction(..) | CallMethod(..) | CallObject(_) => (0, 1),
        // The rest gives parts of values, numbers, truth, arguments of a call whose result is checked, or nothing.
        _ => (0, 0),
    }
}

/// Measures a value as if it were written out: a part that is there twice counts twice.
struct Extent<'a> {
    state: &'a State<'a, 'a>,
    n_bytes_left: usize,
}

impl<'a> Extent<'a> {
    fn new(state: &'a State<'a, 'a>, n_bytes_max: usize) -> Self {
        Self {
            state,
            n_bytes_left: n_bytes_max,
        }
    }

    /// The value when it is within bounds. A sequence that makes its items on demand becomes a list.
    fn check(mut self, value: &Value) -> Result<Value, Error> {
        if value.kind() != ValueKind::Iterable {
            self.visit(value, 0)?;
            return Ok(value.clone());
        }
        let mut items = Vec::new();
        for item in value.try_iter()? {
            self.visit_part(&item, 1)?;
            items.push(item);
        }
        Ok(Value::from(items))
    }

    fn visit(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let n_bytes = match value.kind() {
            ValueKind::String => value.as_str().map_or(0, str::len),
            ValueKind::Bytes => value.as_bytes().map_or(0, <[u8]>::len),
            _ => 8,
        };
        let left = self.n_bytes_left.checked_sub(n_bytes);
        self.n_bytes_left = left.ok_or_else(|| failure("a value grows beyond all bounds"))?;
        if depth == DEPTH_MAX {
            return Err(failure("a value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.visit_part(&item, depth + 1)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    self.visit_part(&key, depth + 1)?;
                    self.visit_part(&item, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn visit_part(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.state.consume_fuel(1)?;
        if is_namespace(value) {
            // It may change later, even to hold what holds it.
            return Err(failure("a namespace cannot be part of another value"));
        }
        self.visit(value, depth)
    }
}

fn is_namespace(value: &Value) -> bool {
    value
        .as_object()
        .is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

fn failure(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

#[cfg(test)]
mod tests;
