// On narrow screens the stylesheet shows each table row as a card; this names the cells after their columns.
document$.subscribe(() => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, index) => {
        if (index > 0 && heads[index]) cell.dataset.label = heads[index];
      });
    }
  }
});
